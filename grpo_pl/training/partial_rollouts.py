"""``PartialRollouts``: settings of completions that grow by parts; `grpo_pl.extras.engines.partial` draws them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PartialRollouts:
    """Settings of partial rollouts: completions grow by parts, and newer weights draw the rest of a longer one.

    Every step brings prompts and trains on as many groups, those that were whole first. The last steps bring none, so
    that no completion is lost at the end.
    """

    part_length: int
    """Most tokens that a completion gets at a time."""
    steps_in_flight: int = 2
    """Steps whose prompts are open at once; 1 waits for all groups of a step, as without parts."""

    def __post_init__(self) -> None:
        for name in ("part_length", "steps_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.partial_rollouts.{name} must be at least 1, got {getattr(self, name)}.")
