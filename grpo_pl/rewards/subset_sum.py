"""``SubsetSumReward``: do the chosen numbers add up to the target, each as often as it is there?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grpo_pl.rewards.base import Score
from grpo_pl.rewards.number_puzzle import NumberPuzzleReward, listed
from grpo_pl.rewards.sorting import read_numbers


@dataclass(kw_only=True)
class SubsetSumReward(NumberPuzzleReward):
    r"""1 if the answer chooses some of the given numbers, none more often than it is there, that add up to the target;
    else 0.

    The answer is read after the thoughts: the content of the last ``\boxed{…}``, else of the last ``<answer>``: whole
    numbers with ``+``, commas or spaces between them, and at its end maybe ``=`` and the target. The target is the gold
    answer, the numbers are the column ``numbers``. An answer of more than 200 characters is ``too_long``.
    """

    trusted: ClassVar[bool] = True
    name: str = "subset_sum"
    """Key of this reward in metrics, tables and files."""

    def judge(self, answer: str, target: int, given: Sequence[int]) -> Score:
        chosen = read_numbers(answer.replace("+", ","), single_digits=False)
        if not chosen:
            return Score(0.0, "wrong", "no whole numbers with + between them")
        if Counter(chosen) - Counter(given):
            return Score(0.0, "wrong", f"chooses {listed(chosen)} of {listed(given)}")
        if sum(chosen) != target:
            return Score(0.0, "wrong", f"{sum(chosen)} instead of {target}"[:80])
        return Score(1.0, "ok", listed(chosen))
