"""``PrefetchedRollouts``: rollouts drawn beside the updates, from slightly older weights, each compared with these."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import trainable_parts
from grpo_pl.environment import Environment
from grpo_pl.extras.engines.child.engine import ChildEngine
from grpo_pl.extras.engines.copy_engine import CopyEngine, Snapshot
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.plain_samples import check_plain, from_plain, to_plain, trimmed
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rollout.engine import ProgressFn, RolloutEngine, RolloutInterrupted
from grpo_pl.rollout.groups import join_samples, samples_to, select_groups
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import Collected, Collector, Draws
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import staleness
from grpo_pl.training.source import RolloutSource, SourceRun
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.training.weight_sync import Comparison, compare
from grpo_pl.types import Problem, PromptBatch, SamplingParams

log = logging.getLogger(__name__)

FINISH_WITHIN_S = 30.0
"""Longest wait for the rollouts under way once the run was told to stop."""
_GIVEN_UP_WITHIN_S = 2.0
"""Longest wait for a cancelled rollout; the engine is killed after that."""
_LOOK_EVERY_S = 0.2

Draw = Callable[[ProgressFn, Callable[[], bool]], Draws]
"""Draws them, telling how far it is and asking whether to stop."""


@dataclass(kw_only=True)
class PendingRollout:
    """A rollout that is drawn, or was, before the step that trains on it."""

    step: int
    version: int
    """Updates that the policy had had at the launch."""
    drawn: Future[Draws]
    weights: list[Tensor] | None = None
    """The trainable parameters at the launch, this rank's part of them, on the CPU; None once they are not needed."""
    sync: Comparison | None = None
    """Result of the comparison with those weights."""
    cancelled: Event = field(default_factory=Event)
    progress: tuple[int, int] = (0, 0)
    """Tokens drawn and completions finished."""

    def note(self, tokens: int, finished: int) -> None:
        """Takes progress from the thread that draws."""
        self.progress = tokens, finished

    @property
    def failure(self) -> str:
        """Why there is no rollout, in one line; empty where there is one."""
        error = self.drawn.exception() if self.drawn.done() else RolloutInterrupted()
        if isinstance(error, RolloutInterrupted):
            return "it was not done in time"
        return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:200]


class PrefetchedRollouts(RolloutSource):
    """Rollouts from weights of ``data.staleness`` updates ago, drawn in one background thread of each rank and in the
    order of their launches. All ranks call its methods together.

    What a rollout is drawn from is decided at its launch, one point of the program: samples depend on weights and keys,
    never on how fast anything is. The thread takes part in no exchange between ranks; they come to agree where a
    rollout is taken, or all are finished. On a CPU the engine's process gets half of this one's threads, or as many as
    it asks for.

    Args:
        staleness: updates between the launch of a rollout and the one that learns from it, from 1.
    """

    default_engine: ClassVar[type[RolloutEngine]] = NativeChildEngine
    stale: ClassVar[bool] = True
    entry: ClassVar[str] = "rollouts"

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._stored: Sequence[dict[str, Any]] = []  # a checkpoint's, until the start
        self._started = False
        self._by_step: dict[int, PendingRollout] = {}
        self._dropped: list[PendingRollout] = []  # to be drawn again; the thread may still be at work on them
        self._deadline = float("inf")  # once the run was told to stop
        self._thread: ThreadPoolExecutor | None = None

    def check(
        self, engine: RolloutEngine, algorithm: GRPOAlgorithm, sampling: SamplingParams, environment: Environment | None
    ) -> None:
        if not isinstance(engine, CopyEngine):
            raise ValueError(
                f"data.staleness is {self.staleness}, and {type(engine).__name__} reads the policy's weights while "
                "they change: set model.engine to NativeChildEngine, VLLMEngine or RayEngine, or leave it out."
            )
        if getattr(engine, "sleep", False):
            raise ValueError(
                f"model.engine: sleep gives memory back between rollouts, and data.staleness {self.staleness} leaves "
                "nothing between them: set one of them to false or 0."
            )

    def check_prompts(self, prompts: Sequence[Problem]) -> None:
        check_plain(prompts)

    def describe(self, algorithm: GRPOAlgorithm, engine: RolloutEngine) -> str:
        return (
            f"rollouts {self.staleness} updates old, corrected by {algorithm.correction}, drawn with "
            f"{getattr(engine, 'threads', None)} threads beside {torch.get_num_threads()} of the updates; "
        )

    def start(self, run: SourceRun) -> None:
        super().start(run)
        sampler, engine = run.collector.sampler, run.collector.sampler.engine
        assert isinstance(engine, CopyEngine) and run.collector.should_stop is not None
        # a tokenizer serves one thread at a time
        self._collector = replace(run.collector, sampler=replace(sampler, tokenizer=deepcopy(sampler.tokenizer)))
        self._engine, self._collective = engine, run.collector.collective
        self._should_stop = run.collector.should_stop
        self._policy, self._data, self._precision = run.policy, run.data, run.precision
        self._threads, self._threads_of_engine = torch.get_num_threads(), getattr(engine, "threads", None)
        if run.policy.device.type == "cpu" and isinstance(engine, ChildEngine):
            engine.threads = engine.threads or max(1, self._threads // 2)
            torch.set_num_threads(max(1, self._threads - engine.threads))
        self._started = True
        self._restore(self._stored)
        self._stored = []

    @property
    def pending(self) -> list[PendingRollout]:
        """Rollouts that no completed step has trained on, by step."""
        return [self._by_step[step] for step in sorted(self._by_step)]

    def take(self, batch: PromptBatch, collector: Collector) -> Collected:
        """Takes the rollout of a step, compared with the policy of its launch. The next ones are launched first, so
        that the engine goes on at once; under dynamic sampling, which may need further attempts of this step, the last
        of them is launched after these.

        Raises:
            OutOfSync: it was not drawn from the policy of its launch.
            RolloutInterrupted: the run was told to stop, on any rank; the rollout goes on.
            Exception: what the drawing raised; on other ranks as ``Collective.interruptible`` says.
        """
        sync, policy, seconds = self.run.sync, self._policy, dict[str, float]()
        self.launch(batch.step - self._collector.algorithm.dynamic_sampling)
        rollout = self._by_step[batch.step]
        report = self._collector.progress(len(batch.prompts) * self._collector.algorithm.group_size)

        def drawn() -> Draws:
            while not rollout.drawn.done():
                if self._should_stop():
                    raise RolloutInterrupted
                report(*rollout.progress)
                wait([rollout.drawn], timeout=_LOOK_EVERY_S)
            return rollout.drawn.result()

        with stopwatch(seconds, "wait"):
            self._collective.interruptible(drawn, self._policy.device)
        with stopwatch(seconds, "sync_proof"):
            found = self._compared(rollout)
        sync.judge(found, policy, self._engine, step=batch.step, expected=rollout.version)
        collected = collector.collect(policy, rollout.drawn.result(), self._data.prompts, seconds)
        if collected.attempts:  # which were drawn here and now
            temperature, ranks = collector.sampling.temperature, self._collective
            sync.check(policy, collected.samples, seconds, self._engine, temperature, ranks, newest_only=True)
        self.launch(batch.step)
        return collected

    def launch(self, step: int) -> None:
        """Begins to draw the rollouts up to ``data.staleness`` steps behind ``step``, unless they are under way."""
        collector, policy = self._collector, self._policy
        greedy = collector.algorithm.needs.greedy_values and not collector.algorithm.dynamic_sampling

        def draw(prompts: Sequence[Problem], step: int, progress: ProgressFn, should_stop: Callable[[], bool]) -> Draws:
            """Runs in the thread, on this rank alone."""
            asked: dict[str, Any] = {"progress": progress, "should_stop": should_stop}
            samples = collector.request(prompts, step).draw(policy, **asked)
            return samples, collector.request(prompts, step, greedy=True).draw(policy, **asked) if greedy else None

        for one in range(self._data.completed_rollouts, min(step + self._data.staleness + 1, self._data.steps)):
            if one not in self._by_step:
                prompts = self._data.prompts(one).prompts
                self._collective.interruptible(partial(check_plain, prompts), policy.device)
                self.begin(one, partial(draw, prompts, one))

    def begin(self, step: int, draw: Draw) -> None:
        """Begins to draw the rollout of ``step`` from the policy's weights of this moment."""
        snapshot, version = self._engine.snapshot(self._policy), self._engine.updates
        same = [rollout.weights for rollout in self._by_step.values() if rollout.version == version and rollout.weights]
        weights = same[0] if same else _on_cpu(self._policy)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grpo_pl-rollouts")
        rollout = PendingRollout(step=step, version=version, drawn=Future(), weights=weights)
        rollout.drawn = self._thread.submit(self._draw, rollout, snapshot, draw)
        self._by_step[step] = rollout

    def commit(self, step: int) -> None:
        self._by_step.pop(step, None)

    def metrics(self, experience: Experience) -> dict[str, float]:
        """``sampling/staleness``: updates of the policy since a token was drawn, mean over the batch."""
        return staleness(experience, self._collective)

    def wait(self) -> None:
        """Waits until the engine has nothing else to draw.

        Raises:
            RolloutInterrupted: a rollout was not done in time.
            Exception: what a rollout has failed by; on other ranks as ``Collective.interruptible`` says.
        """

        def results() -> None:
            for rollout in self.pending:
                if not rollout.drawn.done():
                    raise RolloutInterrupted("a rollout that was drawn ahead was not done in time")
                rollout.drawn.result()

        if self._started and self._ended():
            self._collective.interruptible(results, self._policy.device)

    def finish(self) -> dict[int, str]:
        """Waits until a checkpoint can hold the rollouts; once the run is told to stop, for 30 s at most.

        Those from the weights that the policy still has are dropped, since they can be drawn again; the others are
        compared with the policy of their launch, which no checkpoint holds.

        Returns:
            Steps whose rollouts are lost, or not from the weights that they should be from, and why, in one line:
            nobody can draw them again.
        """
        if not self._started:
            return {}
        for step in [rollout.step for rollout in self.pending if rollout.version == self._data.completed_rollouts]:
            self._dropped.append(self._by_step.pop(step))
            self._dropped[-1].cancelled.set()
        if lost := self._ended():
            return lost
        found = [(rollout, self._compared(rollout)) for rollout in self.pending]
        holds = partial(self.run.sync.holds, policy=self._policy, engine=self._engine)
        with self._precision():
            wrong = [rollout for rollout, sync in found if not holds(sync, expected=rollout.version)]
        return {rollout.step: "it was not drawn from the policy's weights" for rollout in wrong}

    def close(self) -> None:
        """Stops what is under way."""
        if not self._started:
            return
        self._started = False
        self._cancel()
        if not all(drawn.done() for drawn in self._under_way()):
            self._engine.kill()
            wait(self._under_way(), timeout=_GIVEN_UP_WITHIN_S)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = None
        self._by_step.clear()
        self._dropped.clear()
        torch.set_num_threads(self._threads)
        if isinstance(self._engine, ChildEngine):
            self._engine.threads = self._threads_of_engine

    def state_dict(self) -> dict[str, Any]:
        """The finished rollouts of all ranks as tensors and plain values, rows in the order of the global batch.

        Raises:
            CheckpointError: some are lost.
        """
        if not self._started:
            return {self.entry: self._stored}
        if lost := self.finish():
            raise CheckpointError(f"rollouts that were drawn ahead are lost, by step: {lost}.")
        states, pad_token_id = [], int(self._collector.sampler.tokenizer.pad_token_id)
        for rollout in self.pending:
            samples, greedy = rollout.drawn.result()
            assert rollout.sync is not None, "no checkpoint holds the weights to compare with"
            state: dict[str, Any] = {"step": rollout.step, "version": rollout.version, "greedy": None}
            state["sync"] = vars(rollout.sync)
            for name, mine in (("samples", samples), ("greedy", greedy)):
                if mine is not None:
                    parts = self._collective.gather_objects(samples_to(mine, torch.device("cpu")))
                    state[name] = to_plain(join_samples(parts, pad_token_id))
            states.append(state)
        return {self.entry: states}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, on any number of ranks: each its part of the rows.

        Raises:
            ValueError: they were drawn with other settings than the run has now; where the fit has not begun, in
                `start`.
        """
        super().load_state_dict(checkpoint)
        self._stored = checkpoint.get(self.entry, [])
        if self._started:  # a sharded checkpoint is read after the start of a fit
            self._restore(self._stored)

    def _restore(self, states: Sequence[dict[str, Any]]) -> None:
        algorithm, episodes = self._collector.algorithm, self._collector.sampler.pool is not None
        for state in states:
            samples = state["samples"]
            recorded = "top_ids" in samples["tensors"], algorithm.needs.top_logprobs > 0
            fields = {
                "model.algorithm.group_size": (samples["group_size"], algorithm.group_size),
                "data.prompts_per_step": (len(samples["problems"]), self._data.prompt_count),
                "top_logprobs of model.algorithm.terms": tuple("above 0" if there else "0" for there in recorded),
                "model.environment": ("null" if samples["episodes"] is None else "set", "set" if episodes else "null"),
            }
            for name, (before, now) in fields.items():
                if before != now:
                    raise ValueError(
                        f"{name} is {now}, and the checkpoint holds prefetched rollouts for which it was {before}: "
                        "resume with the former value, or begin a run of another --name."
                    )
        for state in states:
            mine, greedy = (
                None if state[name] is None else _share(from_plain(state[name]), self._collective, self._policy.device)
                for name in ("samples", "greedy")
            )
            assert mine is not None
            drawn: Future[Draws] = Future()
            drawn.set_result((mine, greedy))
            self._by_step[state["step"]] = PendingRollout(
                step=state["step"], version=state["version"], sync=Comparison(**state["sync"]), drawn=drawn
            )

    def _draw(self, rollout: PendingRollout, snapshot: Snapshot, draw: Draw) -> Draws:
        self._engine.use(snapshot)
        try:
            if rollout.cancelled.is_set():
                raise RolloutInterrupted
            return draw(rollout.note, rollout.cancelled.is_set)
        finally:
            self._engine.use(None)

    def _compared(self, rollout: PendingRollout) -> Comparison:
        """Compares a rollout with the policy of its launch; once, since those weights are dropped then."""
        if rollout.sync is None:
            samples, _ = rollout.drawn.result()
            assert rollout.weights is not None
            now = rollout.version == self._data.completed_rollouts
            with self._precision(), nullcontext() if now else earlier_weights(self._policy, rollout.weights):
                temperature = self._collector.sampling.temperature
                rollout.sync = compare(self._policy, samples, None, temperature, self._collective)
            rollout.weights = None
        return rollout.sync

    def _ended(self) -> dict[int, str]:
        """Waits until nothing is under way; once any rank is told to stop, for 30 s at most. Returns the steps whose
        rollouts failed, or were not done in time, on any rank, with the cause in one line."""
        collective, device = self._collective, self._policy.device
        while collective.any(not all(drawn.done() for drawn in self._under_way()), device):
            if self._deadline == float("inf") and collective.any(self._should_stop(), device):
                log.warning("told to stop: waits %.0f s at most for the rollouts under way.", FINISH_WITHIN_S)
                self._deadline = time.monotonic() + FINISH_WITHIN_S
            if collective.any(time.monotonic() > self._deadline, device):
                self._cancel()
                break
            wait(self._under_way(), timeout=_LOOK_EVERY_S)
        lost = {rollout.step: cause for rollout in self.pending if (cause := rollout.failure)}
        for part in collective.gather_objects(lost):
            lost = part | lost
        return dict(sorted(lost.items()))

    def _under_way(self) -> list[Future[Draws]]:
        """Rollouts that the thread works on, or will."""
        self._dropped = [rollout for rollout in self._dropped if not rollout.drawn.done()]
        return [rollout.drawn for rollout in [*self.pending, *self._dropped]]

    def _cancel(self) -> None:
        for rollout in self.pending:
            rollout.cancelled.set()
        wait(self._under_way(), timeout=_GIVEN_UP_WITHIN_S)


def _share(samples: Samples, collective: Collective, device: torch.device) -> Samples:
    """This rank's groups of those of all ranks."""
    groups = len(samples.prompts)
    share, rest = divmod(groups, collective.world)
    if rest:
        raise ValueError(f"a rollout of {groups} prompts in the checkpoint does not divide among {collective.world}.")
    mine = range(collective.rank * share, (collective.rank + 1) * share)
    return samples_to(trimmed(select_groups(samples, list(mine))), device)


def _on_cpu(policy: nn.Module) -> list[Tensor]:
    """Copies of this rank's part of the trainable parameters."""
    return [parameter.detach().to("cpu", copy=True) for parameter in trainable_parts(policy)]


@contextmanager
@torch.no_grad()
def earlier_weights(policy: nn.Module, weights: Sequence[Tensor]) -> Iterator[None]:
    """Context manager: within it the policy has the trainable parameters of an earlier moment. Exchanges nothing."""
    present = _on_cpu(policy)
    try:
        for parameter, value in zip(trainable_parts(policy), weights, strict=True):
            parameter.copy_(value)
        torch.clear_autocast_cache()  # a caller's autocast may keep casts of the former values
        yield
    finally:
        for parameter, value in zip(trainable_parts(policy), present, strict=True):
            parameter.copy_(value)
        torch.clear_autocast_cache()
