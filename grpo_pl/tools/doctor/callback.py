"""``Doctor``: a callback that measures the first rollouts of a run and prints what will hinder learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.tools.doctor.problems import SeenProblems
from grpo_pl.tools.doctor.rollouts import RolloutMeter, run_settings
from grpo_pl.tools.doctor.rules import findings, held_out_share
from grpo_pl.tools.doctor.run_statistics import (
    MIN_ROLLOUTS,
    AnswerStatistics,
    Finding,
    ProblemStatistics,
    RewardStatistics,
    RolloutStatistics,
    RunStatistics,
)
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.module import GRPOModule

ROLLOUTS = 10
"""Rollouts of a run that are looked at."""


class Doctor(StepCallback):
    """Measures the first rollouts and prints each finding once, with its code (``docs/doctor.md``). It changes no
    sample and no weight; a resumed run goes on measuring and repeats nothing."""

    drift_every = 3
    """Every so many rollouts, log-probabilities are computed once more: below 1 % of the time of a step on average."""
    known: AnswerStatistics | None = None
    """None: a run calls its rewards for its completions alone."""

    def __init__(self, rollouts: int = ROLLOUTS) -> None:
        self.rollouts = rollouts
        self.measured: list[RolloutStatistics] = []
        self._said: list[str] = []
        self._meter: RolloutMeter | None = None
        self._seen = SeenProblems()

    def state_dict(self) -> dict[str, Any]:
        return {"said": self._said, "measured": list(map(asdict, self.measured))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._said = list(state_dict["said"])
        self.measured = [
            RolloutStatistics(**{**one, "rewards": tuple(RewardStatistics(**reward) for reward in one["rewards"])})
            for one in state_dict["measured"]
        ]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._meter = None
        if len(self.measured) < self.rollouts:
            self._meter = self.new_meter(cast(GRPOModule, pl_module))
            self._meter.begin()

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        if self._meter is None:
            return {}
        module, data = cast(GRPOModule, pl_module), _data(trainer)
        step = experience.samples.step
        rate = module.optimization.lr_at(step, data.steps) / module.optimization.peak
        drift = len(self.measured) % self.drift_every == 0
        self.measured.append(self._meter.end(experience, rate=rate or 1.0, drift=drift))
        self._seen.add(experience.samples.prompts)
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is None:
            return
        self._meter = None
        logged = trainer.callback_metrics
        clipped = logged.get("clip_ratio/region_mean") if self.measured[-1].mixed else None
        self.measured[-1] = replace(
            self.measured[-1],
            clipped=None if clipped is None else float(clipped),
            skipped=int(logged.get("updates/skipped", 0)),
        )
        if trainer.is_global_zero:
            for finding in findings(self.statistics(trainer, cast(GRPOModule, pl_module))):
                if finding.code not in self._said:
                    self._said.append(finding.code)
                    self.say(finding)

    def statistics(self, trainer: Trainer, module: GRPOModule) -> RunStatistics:
        """All that has been measured so far."""
        data = _data(trainer)
        return RunStatistics(
            settings=run_settings(module, rollouts=data.steps, prompts_per_step=data.prompt_count),
            problems=self.problems(data),
            answers=self.known,
            rollouts=self.measured,
            held_out=held_out_share(module, data) if len(self.measured) <= MIN_ROLLOUTS else None,  # it learns
        )

    def problems(self, data: RolloutDataModule) -> ProblemStatistics | None:
        """Statistics of the problems that the rollouts asked."""
        return self._seen.statistics(data)

    def say(self, finding: Finding) -> None:
        print_line(str(finding))

    def new_meter(self, module: GRPOModule) -> RolloutMeter:
        return RolloutMeter(module)


def print_line(line: str) -> None:
    """One line on the terminal, with the page that explains it."""
    Console(stderr=True).print(f"{line} (docs/doctor.md)", highlight=False, soft_wrap=True, markup=False)


def _data(trainer: Trainer) -> RolloutDataModule:
    return cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
