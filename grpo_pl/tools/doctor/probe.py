"""``Probe``: the doctor of a short run that is thrown away, which answers what a run itself would not stop for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.tools.doctor.answers import end_chance, scored_again
from grpo_pl.tools.doctor.callback import Doctor
from grpo_pl.tools.doctor.finding import Finding
from grpo_pl.tools.doctor.precision import bfloat16_gain
from grpo_pl.tools.doctor.rollouts import RolloutMeter
from grpo_pl.tools.doctor.run_statistics import AnswerStatistics, ProblemStatistics, RunStatistics
from grpo_pl.tools.doctor.shown import ShownPrompt, shown_prompts
from grpo_pl.training.experience import Experience
from grpo_pl.training.module import GRPOModule


class ProbeTrainer(Trainer):
    """A Trainer with the verb ``doctor``."""

    def doctor(self, model: LightningModule, datamodule: LightningDataModule, weights_only: bool | None = None) -> None:
        """Looks at the first rollouts."""
        self.fit(model, datamodule=datamodule, weights_only=weights_only)


class Probe(Doctor):
    """The doctor of a probe: it has looked at problems and answers before, ends in time, and says nothing itself."""

    drift_every = 1

    def __init__(self, rollouts: int, seconds: float) -> None:
        super().__init__(rollouts)
        self.seconds = seconds
        self.found: ProblemStatistics | None = None
        self.known: AnswerStatistics | None = None
        self.result: RunStatistics | None = None
        self.shown: list[ShownPrompt] = []
        self.timed_out = False
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the first rollout began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def should_stop(self) -> bool:
        self.timed_out = self.timed_out or self.elapsed > self.seconds
        return self.timed_out

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        super().step_metrics(trainer, pl_module, experience)
        assert isinstance(pl_module, GRPOModule)
        if not self.shown:
            self.shown = shown_prompts(experience, pl_module.tokenizer)
            gain = bfloat16_gain(trainer, pl_module, experience.samples.prompts, self.should_stop)
            self.measured[-1] = replace(self.measured[-1], bfloat16_gain=gain)
        if len(self.measured) == 1 and self.known is not None:
            again = scored_again(self.known, experience, pl_module.rewards)
            self.known = replace(again, end_chance=end_chance(pl_module, experience))
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert isinstance(pl_module, GRPOModule)
        self.result = self.statistics(trainer, pl_module)
        trainer.should_stop = trainer.should_stop or self.should_stop()

    def problems(self, data: RolloutDataModule) -> ProblemStatistics | None:
        return self.found

    def answers(self) -> AnswerStatistics | None:
        return self.known

    def say(self, finding: Finding) -> None:
        """Nothing: all findings are printed together."""

    def _new_meter(self, module: GRPOModule) -> RolloutMeter:
        return RolloutMeter(module, most_rows=32, share=1.0)
