"""Several rewards over one batch of completions: what training, validation, ``score`` and the server all call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_pl.functional.exact_sums import weighted_sum
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.process import ProcessReward


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The scores of every reward, in the order of the rewards, each with one score per completion."""

    rewards: Sequence[Reward]
    scores: Sequence[Sequence[Score]]  # (R, B)

    def values(self) -> list[list[float]]:
        """(R, B) numbers, NaN where a score has none."""
        return [[math.nan if score.value is None else score.value for score in row] for row in self.scores]

    def totals(self) -> list[float | None]:
        """Weighted sum per completion over the rewards that have a value; None where none of non-zero weight has."""
        sums: list[float | None] = []
        for row in zip(*self.scores, strict=True):
            parts = [(s.value, r.weight) for r, s in zip(self.rewards, row, strict=True) if r.weight]
            there = [(value, weight) for value, weight in parts if value is not None]
            sums.append(weighted_sum([v for v, _ in there], [w for _, w in there]) if there else None)
        return sums

    def correct(self) -> list[bool | None]:
        """Per completion, whether the correctness reward gave it its full value; None where it could not say."""
        index = next((i for i, reward in enumerate(self.rewards) if reward.correctness), None)
        if index is None:
            return [None] * (len(self.scores[0]) if self.scores else 0)
        return [None if score.value is None else score.value >= 1.0 for score in self.scores[index]]

    def select(self, rows: Sequence[int]) -> ScoredBatch:
        """The scores of some completions, in the order of ``rows``."""
        return ScoredBatch(rewards=self.rewards, scores=[[row[i] for i in rows] for row in self.scores])

    def status_counts(self) -> dict[str, Counter[str]]:
        """How often each status occurred, per reward name."""
        return {r.name: Counter(s.status for s in row) for r, row in zip(self.rewards, self.scores, strict=True)}


def join_scores(rewards: Sequence[Reward], parts: Sequence[Sequence[Sequence[Score]]]) -> ScoredBatch:
    """Scores (R, B) of several batches by the same rewards, one batch after the other."""
    scores = [[score for part in parts for score in part[i]] for i in range(len(rewards))]
    return ScoredBatch(rewards=rewards, scores=scores)


def score_completions(
    rewards: Sequence[Reward],
    *,
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> ScoredBatch:
    """Calls every reward once on the whole batch.

    Raises:
        ValueError: a reward returned another number of scores, or a value that is not finite.
    """
    scores = []
    for reward in rewards:
        row = reward(completions, answers, columns)
        if len(row) != len(completions):
            raise ValueError(f"reward {reward.name!r} returned {len(row)} scores for {len(completions)} completions.")
        bad = next((s for s in row if s.value is not None and not math.isfinite(s.value)), None)
        if bad is not None:
            raise ValueError(f"reward {reward.name!r} returned {bad.value}: rewards must be finite numbers or None.")
        scores.append(row)
    return ScoredBatch(rewards=rewards, scores=scores)


def check_rewards(rewards: Sequence[Reward], *, steps_needed: bool = False) -> None:
    """Refuses a list of rewards that training or evaluation could not use.

    Args:
        steps_needed: the objective supervises steps, so some reward must score them.

    Raises:
        ValueError: no rewards, two of one name, a weight that is not finite, weights that are all 0, other than one
            correctness reward, or none that scores steps where that is needed.
    """
    if not rewards:
        raise ValueError("no rewards: give at least one under model.rewards, such as grpo_pl.rewards.MathReward.")
    names = Counter(reward.name for reward in rewards)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(f"two rewards are named {twice[0]!r}: give each its own `name`.")
    for reward in rewards:
        if not math.isfinite(reward.weight):
            raise ValueError(f"reward {reward.name!r} has weight {reward.weight}: weights must be finite.")
    if not any(reward.weight for reward in rewards):
        raise ValueError("every reward has weight 0: give one of them another, or there is nothing to learn from.")
    judges = [reward.name for reward in rewards if reward.correctness]
    if len(judges) != 1:
        raise ValueError(
            f"{len(judges)} rewards have `correctness: true` ({', '.join(judges) or 'none'}): exactly one must say "
            "what a right answer is."
        )
    if steps_needed and not any(isinstance(reward, ProcessReward) for reward in rewards):
        raise ValueError(
            "algorithm.supervision is process, but no reward scores steps: add one under model.rewards, such as "
            "grpo_pl.rewards.ColumnArithmeticReward, or set supervision: outcome."
        )
