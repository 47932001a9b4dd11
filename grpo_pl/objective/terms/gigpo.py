"""``GiGPO``: credits a turn with its episode's advantage, and with its own among all turns in the same state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_pl.functional import turn_credit
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.turn_credit import EpisodeStatistics
from grpo_pl.objective.terms.base import CollectedTokens
from grpo_pl.objective.terms.parts import TurnCredit


@dataclass(frozen=True, kw_only=True)
class GiGPO(TurnCredit):
    """A of a turn = the episode's advantage in its group + step_weight · the turn's among all turns of the group in the
    same state. ``scale: none`` is its mean_norm; group_std divides both parts by their standard deviation.

    Source: GiGPO, arXiv:2505.10978, eq. 8, whose ω is ``step_weight``. ``gamma`` discounts the turn's part alone.

    Raises:
        ValueError: a field is out of its range, or an objective that compares otherwise.
    """

    step_weight: float = 1.0
    """Weight of the turn's advantage beside the episode's."""
    episode_statistics: EpisodeStatistics = "episodes"
    """Mean and standard deviation of the episodes' returns: each episode counts once, or, as in its authors' code
    (steps), as often as it has turns."""
    invalid_action_penalty: float = 0.0
    """Taken off what is compared of a turn with an invalid action, after discounting (0.1 in its authors' code)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("episode_statistics", self.episode_statistics, EpisodeStatistics)
        for name in ("step_weight", "invalid_action_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}.")

    def check(self, algorithm: Any) -> None:
        super().check(algorithm)
        if algorithm.baseline != "group_mean" or algorithm.scale not in ("none", "group_std"):
            raise ValueError(
                "GiGPO compares with the mean of the group: set baseline group_mean and scale none or group_std, not "
                f"{algorithm.baseline} and {algorithm.scale}."
            )
        if algorithm.scale == "group_std" and algorithm.std_ddof != 1:
            raise ValueError("GiGPO divides by the sample's standard deviation: set std_ddof 1, or scale none.")

    def turn_advantages(self, collected: CollectedTokens) -> Tensor:
        turns, how = collected.turns, collected.grouping
        assert turns is not None and collected.valid is not None
        return turn_credit.gigpo_advantages(
            turns.rewards,
            turns.present,
            self.anchors(collected),
            group_size=how.group_size,
            valid=collected.valid,
            step_weight=self.step_weight,
            gamma=self.gamma,
            norm="mean" if how.scale == "none" else "mean_std",
            statistics=self.episode_statistics,
            invalid_actions=turns.invalid_actions,
            invalid_action_penalty=self.invalid_action_penalty,
            eps=how.eps,
        )
