"""What a run says about itself: ``Doctor`` looks at its first rollouts for what will hinder learning; ``MidCourse``
says after a third of them if held-out answers get better, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.extras.doctor.problems import SeenProblems
from grpo_pl.extras.doctor.rollouts import (
    held_out_share,
    measure_rollout,
    policy_change,
    run_settings,
    weight_change,
    weight_sample,
)
from grpo_pl.extras.doctor.rules import Rule, findings, memorised
from grpo_pl.extras.doctor.run_statistics import (
    MIN_ROLLOUTS,
    AnswerStatistics,
    Finding,
    ProblemStatistics,
    RewardStatistics,
    RolloutStatistics,
    RunStatistics,
)
from grpo_pl.functional.estimates import paired_difference
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.lightning_loops import completed_rollouts, data_of
from grpo_pl.training.module import GRPOModule

ROLLOUTS = 10
"""Rollouts of a run that are looked at."""
PART = 3
"""The line about the course comes with the first validation after one rollout in this many …"""
LOOKED_AT = 5
"""… and gives a reason from so many rollouts before it."""
SOLVED = 0.95
FEWEST = 10
"""Held-out problems below which the line gives no verdict."""
MEMORISED = Rule("D02", "memorised", "", memorised)


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


class MidCourse(StepCallback):
    """Compares held-out pass@1 with that of the first validation, problem by problem, and prints a line a third of the
    way; at the end it says if training problems are answered far better than held-out ones. Needs a reward with
    ``correctness``; changes nothing."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._said = False
        self._recent: list[RolloutStatistics] = []

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "said": self._said}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first, self._said = dict(state_dict["first"]), state_dict["said"]

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        statistics = measure_rollout(experience, cast(GRPOModule, pl_module).rewards)
        self._recent = [*self._recent[1 - LOOKED_AT :], statistics]
        return {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or not trainer.is_global_zero:
            return
        module, data = cast(GRPOModule, pl_module), data_of(trainer)
        now = {  # of whole sets: the sources of a mixed one are in it
            f"{name}/{problem}": share
            for name in data.held_out()
            if (result := module.held_out.get(f"{name}/pass@1")) is not None
            for problem, share in result.problems.items()
        }
        rollouts, done = data.steps, completed_rollouts(trainer)
        if done == 0 or not self._first:
            self._first = now
        elif done < rollouts and not self._said and done >= rollouts // PART:
            self._said = True
            seen = self._statistics(module, data)
            reasons = findings(seen) if self._recent else None  # none has been seen since a resume
            print_line(f"After {done} of {rollouts} rollouts: {course(self._first, now, reasons)}")
        elif done >= rollouts and (found := MEMORISED(self._statistics(module, data))):
            print_line(str(found))

    def _statistics(self, module: GRPOModule, data: RolloutDataModule) -> RunStatistics:
        settings = run_settings(module, data)
        return RunStatistics(settings=settings, rollouts=self._recent, held_out=held_out_share(module, data))


def course(first: Mapping[str, float], now: Mapping[str, float], reasons: list[Finding] | None) -> str:
    """The change of held-out pass@1 since the first validation with its 95 % interval (`paired_difference`), and where
    that is not above 0 the first of the reasons; None: nobody has looked for them."""
    both = [name for name in first if name in now]
    if len(both) < FEWEST:
        return f"{len(both)} held-out problems were answered in both validations: too few to say if it is learning."
    before, after = (torch.tensor([of[name] for name in both], dtype=torch.float64) for of in (first, now))
    change = paired_difference(after, before)
    low, high = change.low, change.high
    solved = high >= 0 and after.mean().item() >= SOLVED
    verdict = "learning" if low > 0 else "getting worse" if high < 0 else "solved" if solved else "no gain yet"
    figures = f"held-out pass@1 {before.mean():.3f} → {after.mean():.3f} (change {low:+.3f} … {high:+.3f})"
    if low > 0 or solved or reasons is None:
        return f"{verdict}, {figures}."
    why = f" {reasons[0]}" if reasons else " No finding of the doctor explains it: more rollouts may."
    return f"{verdict}, {figures}.{why}"


def print_line(line: str) -> None:
    """One line on the terminal, with the page that explains it."""
    Console(stderr=True).print(f"{line} (docs/doctor.md)", highlight=False, soft_wrap=True, markup=False)
