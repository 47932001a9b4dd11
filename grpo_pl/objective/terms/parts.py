"""What terms that credit parts of a completion have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_pl.functional import turn_credit
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import CollectedTokens, Term
from grpo_pl.types import SamplingParams


def check_parts(algorithm: Any, name: str, *, part: str, advantage: str) -> None:
    """Refuses an objective whose advantages are those of whole completions.

    Args:
        name: of the term.
        part: what it takes rewards of.
        advantage: what has an advantage.
    """
    if algorithm.overlong_buffer > 0 or algorithm.kl_in_reward:
        raise ValueError(
            f"{name} takes rewards of {part}s, which have no overlong penalty or KL: set overlong_buffer 0 and "
            "kl_placement loss."
        )
    if algorithm.reward_aggregation == "normalize_then_sum":
        raise ValueError(f"{name} has one reward per {part}: set reward_aggregation sum_then_normalize.")
    if algorithm.ratio_level == "geometric":
        raise ValueError(
            f"ratio_level geometric has one objective per completion, {name} one advantage per {advantage}: set "
            "ratio_level token or sequence."
        )
    if algorithm.surrogate == "nll":
        raise ValueError(f"surrogate nll ignores advantages, and {name} makes them: leave out one of the two.")


@dataclass(frozen=True, kw_only=True)
class TurnCredit(Term):
    """What terms that credit turns have in common.

    Raises:
        ValueError: a field is out of its range.
    """

    gamma: float = 1.0
    """Discount of rewards from turn to turn."""
    state_similarity: float | None = None
    """Two texts count as one state where difflib's ratio reaches this number, in (0, 1]; null asks for equality."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must lie in [0, 1], 1 being no discount, got {self.gamma}.")
        if self.state_similarity is not None and not 0 < self.state_similarity <= 1:
            raise ValueError(f"state_similarity must lie in (0, 1] or be null, got {self.state_similarity}.")

    @property
    def needs(self) -> Needs:
        return Needs(turns=True)

    def check(self, algorithm: Any) -> None:
        check_parts(algorithm, type(self).__name__, part="turn", advantage="turn")

    def check_run(self, *, sampling: SamplingParams, in_environment: bool) -> None:
        if not in_environment:
            raise ValueError(
                f"{type(self).__name__} credits turns, and there is no model.environment that has any: name one, or "
                "leave the term out."
            )

    def credit(self, collected: CollectedTokens) -> Tensor:
        assert collected.turns is not None
        by_turn = self.turn_advantages(collected).to(collected.tokens["advantages"].dtype)
        return turn_credit.spread_over_tokens(by_turn, collected.turns.index)

    def turn_advantages(self, collected: CollectedTokens) -> Tensor:
        """(B, K), 0 where there is no turn."""
        raise NotImplementedError

    def anchors(self, collected: CollectedTokens) -> Tensor:
        """(B, K) int64 numbers of the states in which turns were taken."""
        assert collected.turns is not None
        return turn_credit.anchor_groups(
            collected.turns.states, group_size=collected.grouping.group_size, similarity=self.state_similarity
        )
