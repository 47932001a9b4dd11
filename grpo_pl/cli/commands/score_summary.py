"""Counts of ``grpo-pl score`` over all rows, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from grpo_pl.rewards.base import Reward, Status

SHOWN = 5
"""Bad gold answers and disagreements that are printed; the output file has them all."""


@dataclass
class ScoreSummary:
    """Counts over all rows; their number does not depend on the number of rows."""

    rows: int = 0
    total: float = 0.0
    valued: int = 0
    correct: int = 0
    judged: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad_golds: int = 0
    expectations: int = 0
    disagreements: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if all gold answers could be read and all expectations were met."""
        return self.bad_golds == 0 and self.disagreements == 0

    def count(self, scores: Mapping[str, Mapping[str, Any]], total: float | None, correct: bool | None) -> None:
        """Adds one completion: its scores by reward, their weighted sum, and whether it is right."""
        self.rows += 1
        if total is not None:
            self.total += total
            self.valued += 1
        if correct is not None:
            self.correct += correct
            self.judged += 1
        for name, one in scores.items():
            self.statuses[name, one["status"]] += 1
            if one["value"] is not None:
                self.sums[name] += one["value"]  # type: ignore[assignment]  # Counter holds floats as well
                self.values[name] += 1

    def add_example(self, text: str) -> None:
        if len(self.examples) < SHOWN:
            self.examples.append(text)


def print_summary(summary: ScoreSummary, rewards: Sequence[Reward], console: Console) -> None:
    """A table of all rewards, with the share of right answers, and what went wrong below it."""
    table = Table(title=f"{summary.rows} completions", title_justify="left")
    for column in ("reward", "weight", "mean", "statuses"):
        table.add_column(column, justify="right" if column in ("weight", "mean") else "left")
    for reward in rewards:
        values = summary.values[reward.name]
        mean = f"{summary.sums[reward.name] / values:.4f}" if values else "–"
        counts = {status: summary.statuses[reward.name, status] for status in get_args(Status)}
        shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        table.add_row(f"{reward.name}{' *' if reward.correctness else ''}", f"{reward.weight:g}", mean, shown)
    if summary.valued:
        table.add_row("total", "", f"{summary.total / summary.valued:.4f}", "")
    console.print(table)
    if summary.judged:
        unjudged = f", {summary.rows - summary.judged} could not be judged" if summary.judged < summary.rows else ""
        share = f"{summary.correct / summary.judged:.2%}{unjudged}"
        console.print(f"correct (*): {summary.correct} of {summary.judged} = {share}")
    if summary.expectations:
        met = summary.expectations - summary.disagreements
        console.print(f"expected: {met} of {summary.expectations} agree")
    if summary.bad_golds:
        console.print(f"gold answers that cannot be judged against: {summary.bad_golds}")
    for example in summary.examples:
        console.print(f"  {example}", markup=False, highlight=False)
