"""``TurnReturns``: credits each turn of an episode with its return, compared with others from the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from grpo_pl.functional import turn_credit
from grpo_pl.objective.terms.base import CollectedTokens
from grpo_pl.objective.terms.parts import TurnCredit


@dataclass(frozen=True, kw_only=True)
class TurnReturns(TurnCredit):
    """A of a turn = its discounted return-to-go less the baseline: the mean of the other episodes of the group from the
    same state, or of their returns where none has been there (`turn_credit.turn_returns`)."""

    def check(self, algorithm: Any) -> None:
        super().check(algorithm)
        if algorithm.baseline not in ("group_mean", "leave_one_out") or algorithm.scale != "none":
            raise ValueError(
                "TurnReturns subtracts what other episodes got from the same state: set baseline leave_one_out or "
                f"group_mean and scale none, not {algorithm.baseline} and {algorithm.scale}."
            )

    def turn_advantages(self, collected: CollectedTokens) -> Tensor:
        turns, how = collected.turns, collected.grouping
        assert turns is not None and collected.valid is not None
        return turn_credit.turn_returns(
            turns.rewards,
            turns.present,
            self.anchors(collected),
            group_size=how.group_size,
            valid=collected.valid,
            gamma=self.gamma,
            baseline=cast(turn_credit.TurnBaseline, how.baseline),  # others are refused
        )
