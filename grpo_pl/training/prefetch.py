"""``PrefetchedRollouts``: rollouts drawn beside the updates, from slightly older weights, each compared with these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_pl.distributed.collective import Collective
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.rollout.copy_engine import CopyEngine
from grpo_pl.rollout.engine import ProgressFn
from grpo_pl.training.collect import Collector, Draws
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import staleness
from grpo_pl.training.pipeline import PendingRollout, RolloutPipeline, earlier_weights
from grpo_pl.training.plain_samples import check_plain
from grpo_pl.training.progress import stopwatch
from grpo_pl.training.sync_proof import Comparison, SyncProof, compare
from grpo_pl.types import Problem, PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.data.datamodule import RolloutDataModule


class PrefetchedRollouts:
    """Rollouts from weights of ``data.staleness`` updates ago. All ranks call its methods together.

    Args:
        collector: draws them, with an engine that keeps a copy of the weights.
        policy: as it is now; its device is where ranks exchange tensors.
        data: says for which steps, and asks the prompts.
        proof: compares what is drawn with the policy of its launch.
        precision: that of a step's forward passes, for checkpoints are saved between steps.
    """

    def __init__(
        self,
        *,
        collector: Collector,
        policy: PreTrainedModel,
        data: RolloutDataModule,
        proof: SyncProof,
        precision: Callable[[], AbstractContextManager[None]],
    ) -> None:
        sampler, self._collective = collector.sampler, collector.collective
        assert isinstance(sampler.engine, CopyEngine) and collector.should_stop is not None
        # a tokenizer serves one thread at a time
        in_thread = replace(sampler, tokenizer=deepcopy(sampler.tokenizer))
        self._collector, self._engine = replace(collector, sampler=in_thread), sampler.engine
        self._policy, self._data, self._proof, self._precision = policy, data, proof, precision
        self._pipeline = RolloutPipeline(
            sampler.engine,
            collective=collector.collective,
            device=policy.device,
            should_stop=collector.should_stop,
            share_threads=policy.device.type == "cpu",
        )

    def take(self, batch: PromptBatch, seconds: dict[str, float]) -> Draws:
        """The rollout of a step, compared with the policy of its launch. The next ones are launched first, so that the
        engine goes on at once; under dynamic sampling, which may need further attempts of this step, the last of them
        is launched after these, by `launch`.

        Raises:
            OutOfSync: it was not drawn from the policy of its launch.
            RolloutInterrupted: the run was told to stop.
            Exception: what the drawing raised.
        """
        self.launch(batch.step - self._collector.algorithm.dynamic_sampling)
        rows = len(batch.prompts) * self._collector.algorithm.group_size
        with stopwatch(seconds, "wait"):
            rollout = self._pipeline.take(batch.step, self._collector.progress(rows))
        with stopwatch(seconds, "sync_proof"):
            found = self._compared(rollout)
        self._proof.judge(found, self._policy, self._engine, step=batch.step, expected=rollout.version)
        return rollout.drawn.result()

    def launch(self, step: int) -> None:
        """Begins to draw the rollouts up to ``data.staleness`` steps behind ``step``, unless they are under way."""
        collector, policy = self._collector, self._policy
        greedy = collector.algorithm.needs_greedy_baseline and not collector.algorithm.dynamic_sampling

        def draw(prompts: Sequence[Problem], step: int, progress: ProgressFn, should_stop: Callable[[], bool]) -> Draws:
            """Runs in the thread, on this rank alone."""
            asked: dict[str, Any] = {"progress": progress, "should_stop": should_stop}
            samples = collector.request(prompts, step).draw(policy, **asked)
            return samples, collector.request(prompts, step, greedy=True).draw(policy, **asked) if greedy else None

        for one in range(self._data.completed_rollouts, min(step + self._data.staleness + 1, self._data.steps)):
            if one not in self._pipeline:
                prompts = self._data.prompts(one).prompts
                self._collective.interruptible(partial(check_plain, prompts), policy.device)
                self._pipeline.launch(one, policy, partial(draw, prompts, one))

    def done(self, step: int) -> None:
        """The update of a step is made."""
        self._pipeline.done(step)

    def step_metrics(self, experience: Experience, collective: Collective) -> dict[str, float]:
        """``sampling/staleness``: updates of the policy since a token was drawn, mean over the batch."""
        return staleness(experience, collective)

    def wait(self) -> None:
        """Waits until the engine has nothing else to draw.

        Raises:
            Exception: what a rollout has failed by.
        """
        if self._pipeline.finish(None):
            self._pipeline.raise_failure()

    def finish(self) -> dict[int, str]:
        """Waits until a checkpoint can hold the rollouts; once the run is told to stop, for 30 s at most.

        Those from the weights that the policy still has are dropped, since they can be drawn again; the others are
        compared with the policy of their launch, which no checkpoint holds.

        Returns:
            Steps whose rollouts are lost, or not from the weights that they should be from, and why, in one line.
        """
        if lost := self._pipeline.finish(self._data.completed_rollouts):
            return lost
        found = [(rollout, self._compared(rollout)) for rollout in self._pipeline.pending]
        holds = partial(self._proof.holds, policy=self._policy, engine=self._engine)
        with self._precision():
            wrong = [rollout for rollout, sync in found if not holds(sync, expected=rollout.version)]
        return {rollout.step: "it was not drawn from the policy's weights" for rollout in wrong}

    def state_dict(self) -> list[dict[str, Any]]:
        """The rollouts that a checkpoint holds.

        Raises:
            CheckpointError: some are lost.
        """
        if lost := self.finish():
            raise CheckpointError(f"rollouts that were drawn ahead are lost, by step: {lost}.")
        return self._pipeline.state_dict(int(self._collector.sampler.tokenizer.pad_token_id))

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes back what `state_dict` gave, on any number of ranks.

        Raises:
            ValueError: they were drawn with other settings than the run has now.
        """
        algorithm, episodes = self._collector.algorithm, self._collector.sampler.pool is not None
        for state in states:
            samples = state["samples"]
            recorded = "top_ids" in samples["tensors"], algorithm.needs_likely
            fields = {
                "model.algorithm.group_size": (samples["group_size"], algorithm.group_size),
                "data.prompts_per_step": (len(samples["problems"]), self._data.prompt_count),
                "model.algorithm.trust_region_top_k": tuple("above 0" if there else "0" for there in recorded),
                "model.environment": ("null" if samples["episodes"] is None else "set", "set" if episodes else "null"),
            }
            for name, (before, now) in fields.items():
                if before != now:
                    raise ValueError(
                        f"{name} is {now}, and the checkpoint holds prefetched rollouts for which it was {before}: "
                        "resume with the former value, or begin a run of another --name."
                    )
        self._pipeline.load_state_dict(states)

    def close(self) -> None:
        """Stops what is under way."""
        self._pipeline.close()

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
