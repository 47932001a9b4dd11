"""``Doctor``: a callback that measures the first rollouts of a run and prints what will hinder learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from grpo_pl.callbacks.lightning_loops import data_of
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.tools.doctor.problems import SeenProblems
from grpo_pl.tools.doctor.rollouts import (
    held_out_share,
    measure_rollout,
    policy_change,
    run_settings,
    weight_change,
    weight_sample,
)
from grpo_pl.tools.doctor.rules import findings
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
    sample and no weight, draws no random number and exchanges nothing between processes but the forward pass that every
    one of them makes; a resumed run goes on measuring and repeats nothing."""

    drift_every, most_rows, rows_share = 3, 8, 1 / 128
    """Every so many rollouts the log-probabilities of a share of the completions, of at least one and at most so many,
    are computed once more: below 1 % of the time of a step on average."""
    known: AnswerStatistics | None = None
    """None: a run calls its rewards for its completions alone."""

    def __init__(self, rollouts: int = ROLLOUTS) -> None:
        self.rollouts = rollouts
        self.measured: list[RolloutStatistics] = []
        self._said: list[str] = []
        self._weights: list[Tensor] | None = None  # a sample, from before the updates of a rollout that is measured
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
        measures = len(self.measured) < self.rollouts
        self._weights = weight_sample(cast(GRPOModule, pl_module).require_policy()) if measures else None

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        if self._weights is None:
            return {}
        module = cast(GRPOModule, pl_module)
        due = len(self.measured) % self.drift_every == 0
        rate = module.optimization.lr_at(experience.samples.step, data_of(trainer).steps) / module.optimization.peak
        measured = replace(
            measure_rollout(experience, module.rewards),
            rate=rate or 1.0,
            **weight_change(self._weights, weight_sample(module.require_policy())),
            **(policy_change(module, experience, most=self.most_rows, share=self.rows_share) if due else {}),
        )
        self.measured.append(measured)
        self._seen.add(experience.samples.prompts)
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._weights is None:
            return
        self._weights = None
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
        data = data_of(trainer)
        return RunStatistics(
            settings=run_settings(module, data),
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


def print_line(line: str) -> None:
    """One line on the terminal, with the page that explains it."""
    Console(stderr=True).print(f"{line} (docs/doctor.md)", highlight=False, soft_wrap=True, markup=False)
