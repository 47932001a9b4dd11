"""``Rule`` and ``Finding``: a test of a run's statistics, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_pl.tools.doctor.run_statistics import RunStatistics

MIN_GROUPS, MIN_ROLLOUTS = 12, 3
"""Fewer say nothing about shares."""
MOSTLY = 0.95
FEW_MIXED = 0.1
"""Rewards count as equal where this share of the groups, or less, has completions of different rewards."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A state that will hinder learning."""

    code: str
    name: str
    figure: float
    """The measured value; its unit is in the sentence."""
    sentence: str
    field: str
    """The setting to change."""
    fix: str = ""
    """YAML that changes it, for a pretrained policy."""

    def __str__(self) -> str:
        return f"{self.code} {self.name}: {self.sentence} Change {self.field}."

    def with_fix(self) -> str:
        """The line of the finding, and below it the YAML to paste, if it has any."""
        if not self.fix:
            return str(self)
        told = "  What may mend it, as a file of its own (fit --config yours.yaml --config it.yaml):"
        return "\n".join([str(self), told, *(f"    {line}" for line in self.fix.splitlines())])


Found = tuple[float, str, str] | None
"""Figure, sentence and field."""


@dataclass(frozen=True)
class Rule:
    """A code with what it stands for and the function that finds it."""

    code: str
    name: str
    find: Callable[[RunStatistics], Found]


def enough(s: RunStatistics) -> bool:
    """True if there were enough groups for shares of them to mean something."""
    return len(s.rollouts) >= MIN_ROLLOUTS and s.total("groups") >= MIN_GROUPS
