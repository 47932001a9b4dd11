"""``RolloutPipeline``: draws rollouts ahead of the steps that train on them, beside the updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import trainable_parts
from grpo_pl.rollout.child.engine import ChildEngine
from grpo_pl.rollout.copy_engine import CopyEngine, Snapshot
from grpo_pl.rollout.engine import ProgressFn, RolloutInterrupted
from grpo_pl.rollout.groups import join_samples, samples_to, select_groups
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import Draws
from grpo_pl.training.plain_samples import from_plain, to_plain, trimmed
from grpo_pl.training.sync_proof import Comparison

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


class RolloutPipeline:
    """Rollouts drawn ahead, in one background thread of each rank and in the order of their launches.

    What a rollout is drawn from is decided at its launch, one point of the program: samples depend on weights and keys,
    never on how fast anything is. The thread takes part in no exchange between ranks; they come to agree where a
    rollout is taken, or all are finished.

    Args:
        engine: works for the thread alone while rollouts are under way.
        device: the one that ranks exchange tensors on.
        should_stop: turns true once this rank is told to stop.
        share_threads: leave half of this process's CPU threads to the engine's, or as many as it asks for.
    """

    def __init__(
        self,
        engine: CopyEngine,
        *,
        collective: Collective,
        device: torch.device,
        should_stop: Callable[[], bool],
        share_threads: bool,
    ) -> None:
        self._engine, self._collective, self._device, self._should_stop = engine, collective, device, should_stop
        self._threads, self._threads_of_engine = torch.get_num_threads(), getattr(engine, "threads", None)
        if share_threads and isinstance(engine, ChildEngine):
            engine.threads = engine.threads or max(1, self._threads // 2)
            torch.set_num_threads(max(1, self._threads - engine.threads))
        self._by_step: dict[int, PendingRollout] = {}
        self._dropped: list[PendingRollout] = []  # to be drawn again; the thread may still be at work on them
        self._deadline = float("inf")  # once the run was told to stop
        self._thread: ThreadPoolExecutor | None = None

    def __contains__(self, step: int) -> bool:
        return step in self._by_step

    @property
    def pending(self) -> list[PendingRollout]:
        """Rollouts that no completed step has trained on, by step."""
        return [self._by_step[step] for step in sorted(self._by_step)]

    def launch(self, step: int, policy: PreTrainedModel, draw: Draw) -> None:
        """Begins to draw the rollout of ``step`` from the policy's weights of this moment; all ranks call it."""
        snapshot, version = self._engine.snapshot(policy), self._engine.updates
        same = [rollout.weights for rollout in self._by_step.values() if rollout.version == version and rollout.weights]
        weights = same[0] if same else _on_cpu(policy)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grpo_pl-rollouts")
        rollout = PendingRollout(step=step, version=version, drawn=Future(), weights=weights)
        rollout.drawn = self._thread.submit(self._draw, rollout, snapshot, draw)
        self._by_step[step] = rollout

    def take(self, step: int, report: ProgressFn) -> PendingRollout:
        """The rollout of ``step``, once it is drawn; all ranks call it.

        Raises:
            RolloutInterrupted: ``should_stop`` turned true on any rank; the rollout goes on.
            Exception: what the drawing raised; on other ranks as ``Collective.interruptible`` says.
        """
        rollout = self._by_step[step]

        def drawn() -> Draws:
            while not rollout.drawn.done():
                if self._should_stop():
                    raise RolloutInterrupted
                report(*rollout.progress)
                wait([rollout.drawn], timeout=_LOOK_EVERY_S)
            return rollout.drawn.result()

        self._collective.interruptible(drawn, self._device)
        return rollout

    def done(self, step: int) -> None:
        """An update was made of the rollout of ``step``."""
        self._by_step.pop(step, None)

    def finish(self, updates: int | None) -> dict[int, str]:
        """Waits until nothing is under way; all ranks call it. Once any of them is told to stop, for 30 s at most.

        Args:
            updates: that the policy has had: rollouts from its present weights are dropped, for they can be drawn
                again. None keeps them.

        Returns:
            Steps whose rollouts failed, or were not done in time, on any rank, with the cause in one line: nobody can
            draw them again.
        """
        for step in [rollout.step for rollout in self.pending if rollout.version == updates]:
            self._dropped.append(self._by_step.pop(step))
            self._dropped[-1].cancelled.set()
        collective = self._collective
        while collective.any(not all(drawn.done() for drawn in self._under_way()), self._device):
            if self._deadline == float("inf") and collective.any(self._should_stop(), self._device):
                log.warning("told to stop: waits %.0f s at most for the rollouts under way.", FINISH_WITHIN_S)
                self._deadline = time.monotonic() + FINISH_WITHIN_S
            if collective.any(time.monotonic() > self._deadline, self._device):
                self._cancel()
                break
            wait(self._under_way(), timeout=_LOOK_EVERY_S)
        lost = {rollout.step: cause for rollout in self.pending if (cause := _failure(rollout))}
        for part in collective.gather_objects(lost):
            lost = part | lost
        return dict(sorted(lost.items()))

    def raise_failure(self) -> None:
        """Raises what a finished rollout failed by, if any did; all ranks call it.

        Raises:
            RolloutInterrupted: one was not done in time.
            Exception: what the drawing raised; on other ranks as ``Collective.interruptible`` says.
        """

        def results() -> None:
            for rollout in self.pending:
                if not rollout.drawn.done():
                    raise RolloutInterrupted("a rollout that was drawn ahead was not done in time")
                rollout.drawn.result()

        self._collective.interruptible(results, self._device)

    def close(self) -> None:
        """Stops what is under way."""
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

    def state_dict(self, pad_token_id: int) -> list[dict[str, Any]]:
        """The finished rollouts of all ranks as tensors and plain values, rows in the order of the global batch."""
        states = []
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
        return states

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes back what `state_dict` gave, on any number of ranks: each its part of the rows."""
        for state in states:
            drawn: Future[Draws] = Future()
            samples, greedy = (
                None if state[name] is None else _share(from_plain(state[name]), self._collective, self._device)
                for name in ("samples", "greedy")
            )
            assert samples is not None
            drawn.set_result((samples, greedy))
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

    def _under_way(self) -> list[Future[Draws]]:
        """Rollouts that the thread works on, or will."""
        self._dropped = [rollout for rollout in self._dropped if not rollout.drawn.done()]
        return [rollout.drawn for rollout in [*self.pending, *self._dropped]]

    def _cancel(self) -> None:
        for rollout in self.pending:
            rollout.cancelled.set()
        wait(self._under_way(), timeout=_GIVEN_UP_WITHIN_S)


def _failure(rollout: PendingRollout) -> str:
    """Why there is no rollout, in one line; empty where there is one."""
    error = rollout.drawn.exception() if rollout.drawn.done() else RolloutInterrupted()
    if isinstance(error, RolloutInterrupted):
        return "it was not done in time"
    return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:200]


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
