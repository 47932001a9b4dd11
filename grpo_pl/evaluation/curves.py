"""Curves of a run's ``metrics.csv``, and stretches of a run in which nothing can be learnt."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Points = list[tuple[int, float]]
"""(completed rollouts, value) pairs in order; rollouts without a value are left out."""
SILENT_ROLLOUTS = 10
"""Rollouts in a row with equal rewards in every group, from which on the run has no learning signal."""
CAUSES = (
    "Likely causes: problems too hard or too easy for the policy (grpo-pl filter, a cold start, another model); "
    "completions cut off before their answer (completions/clipped_ratio, model.sampling.max_completion_length); "
    "rewards that find no answer (read completions.jsonl: prompt and template must ask for the form that they read); "
    "too low a model.sampling.temperature."
)


@dataclass
class SilentRollouts:
    """Counts the rollouts in a row in which rewards are equal in every group, so that every advantage is 0."""

    in_a_row: int = 0
    first: int = 0
    """Number of the first of them."""

    def add(self, rollout: int, equal_share: float) -> bool:
        """Counts a rollout by its ``frac_reward_zero_std``; true once there is no learning signal."""
        self.first = self.first if self.in_a_row else rollout
        self.in_a_row = self.in_a_row + 1 if equal_share == 1.0 else 0
        return self.in_a_row >= SILENT_ROLLOUTS


def no_signal(columns: Mapping[str, Points]) -> str:
    """A warning with the first ``SILENT_ROLLOUTS`` of a run and likely causes; ``""`` if there are none."""
    silent = SilentRollouts()
    for rollout, share in columns.get("frac_reward_zero_std", []):
        if silent.add(rollout, share):
            return (
                f"No learning signal: the rewards of every group were equal from rollout {silent.first} to {rollout}. "
                f"{CAUSES}"
            )
    return ""


def read_curves(path: Path) -> dict[str, Points]:
    """The columns of ``metrics.csv`` but ``step``, each with the rows that hold a finite number in it."""
    columns: dict[str, Points] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            if "step" not in (rows.fieldnames or ()):
                raise ValueError("there is no column `step`")
            for row in rows:
                step = int(float(row["step"]))
                for name, cell in row.items():
                    if name not in ("step", None) and cell:
                        value = float(cell)
                        if math.isfinite(value):  # a skipped update logs its loss as NaN: nothing to draw
                            columns.setdefault(name, []).append((step, value))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {rows.line_num} of '{path}' is not of a run's metrics: {error}.") from error
    return columns
