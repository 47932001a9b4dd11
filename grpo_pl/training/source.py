"""``RolloutSource``: where the scored completions of a step come from; by default they are drawn as the step begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.environment import Environment
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training.collect import Collected, Collector
from grpo_pl.training.experience import Experience
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.training.weight_sync import WeightSyncCheck
from grpo_pl.types import Problem, PromptBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class SourceRun:
    """What a source works with from the start of a fit."""

    collector: Collector
    policy: PreTrainedModel
    data: RolloutDataModule
    sync: WeightSyncCheck
    precision: Callable[[], AbstractContextManager[None]]
    """That of a step's forward passes, for checkpoints are saved between steps."""


class RolloutSource:
    """Draws and scores the completions of each step; all ranks call its methods together.

    Before the fit it says what it needs (`default_engine`, `stale`, `check`); `start` begins it, `close` ends it.
    """

    default_engine: ClassVar[type[RolloutEngine]] = NativeEngine
    """Draws where ``model.engine`` is null."""
    stale: ClassVar[bool] = False
    """True if completions may be from earlier weights than those that learn from them."""
    entry: ClassVar[str | None] = None
    """Name of what it keeps in a checkpoint; None keeps nothing."""
    run: SourceRun
    """Since `start`."""

    def check(
        self, engine: RolloutEngine, algorithm: GRPOAlgorithm, sampling: SamplingParams, environment: Environment | None
    ) -> None:
        """Refuses, by ``ValueError``, what the source does not go with."""

    def check_prompts(self, prompts: list[Problem]) -> None:
        """Refuses prompts that the source could not keep in a checkpoint."""

    def describe(self, algorithm: GRPOAlgorithm, engine: RolloutEngine) -> str:
        """Says how it draws, for the line at the start of a run; empty for what everybody expects."""
        return ""

    def start(self, run: SourceRun) -> None:
        """Begins to work for a fit, with what `load_state_dict` has taken before."""
        self.run = run

    def take(self, batch: PromptBatch, collector: Collector) -> Collected:
        """The scored completions of a step, checked to be from the weights that they should be from.

        Args:
            collector: draws and scores as the module is set up now.

        Raises:
            OutOfSync: an engine has drawn from other weights.
            RolloutInterrupted: the run was told to stop.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until the engine works for nobody else."""

    def commit(self, step: int) -> None:
        """The step is made, so that its completions are used up."""

    def metrics(self, experience: Experience) -> dict[str, float]:
        """Metrics of the step that was taken last."""
        return {}

    def finish(self) -> dict[int, str]:
        """Waits until a checkpoint can hold what is under way.

        Returns:
            The steps whose completions are lost, and why, in one line each: nobody can draw them again.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint."""
        return {}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the entries of a checkpoint back, before or after `start`; warns of those that no source takes now."""
        for entry, told in LEFT.items():
            if checkpoint.get(entry) and entry != self.entry:
                rank_zero_warn(told)

    def close(self) -> None:
        """Stops what is under way."""


LEFT = {
    "rollouts": "data.staleness is 0: rollouts that the checkpoint holds are drawn again.",
    "carried": "model.partial_rollouts is off: completions that the checkpoint carries are dropped.",
}
"""Entry of a checkpoint -> what a run says that has no source for it."""


class SynchronousRollouts(RolloutSource):
    """Draws the completions of a step from the policy as it is, and lets it wait for them."""

    def take(self, batch: PromptBatch, collector: Collector) -> Collected:
        policy, seconds = self.run.policy, dict[str, float]()
        with stopwatch(seconds, "rollout"):
            samples = collector.draw(policy, collector.request(batch.prompts, batch.step))
        collected = collector.collect(policy, (samples, None), self.run.data.prompts, seconds)
        engine, temperature = collector.sampler.engine, collector.sampling.temperature
        self.run.sync.check(policy, collected.samples, seconds, engine, temperature, collector.collective)
        return collected
