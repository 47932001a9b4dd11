"""``SortingReward``: partial credit for sorting a list of numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from grpo_pl.rewards.answer_text import last_boxed
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.format import answer_block


def distance_points(gold: Sequence[int], answer: Sequence[int]) -> int:
    """Positions where the sorted list and the answer agree: 0 … L."""
    return sum(x == y for x, y in zip(gold, answer, strict=False))


def inclusion_points(gold: Sequence[int], answer: Sequence[int]) -> int:
    """Numbers of the list found in the answer, each as often as it occurs in both: Σ min(count_x, count_y); 0 … L."""
    return (Counter(gold) & Counter(answer)).total()


def simple_inclusion_points(gold: Sequence[int], answer: Sequence[int]) -> int:
    """Numbers of the list that occur in the answer at all; one copy then pays for all of its duplicates. 0 … L."""
    return sum(x in answer for x in gold)


def order_points(answer: Sequence[int]) -> int:
    """Neighbours of the answer that are in order: Σ [y_i ≤ y_{i+1}]; 0 … L − 1."""
    return sum(x <= y for x, y in pairwise(answer))


def read_numbers(text: str, *, single_digits: bool) -> list[int]:
    """All integers of ``text``; with ``single_digits`` every digit is a number of its own, so ``0123`` is four."""
    return [int(number) for number in re.findall(r"\d" if single_digits else r"-?\d+", text)]


@dataclass(kw_only=True)
class SortingReward(Reward):
    r"""Partial credit for sorting L numbers, against the sparse signal of right or wrong.

    - ``distance``: positions that hold the right number.
    - ``inclusion_order``: numbers of the list that are there, counted as a multiset, plus neighbours in order.
    - ``inclusion_order_simple``: the same, but one copy of a number stands for all of its duplicates.

    The points are divided by their maximum (L or 2L − 1), so the range is [0, 1] and 1 is the sorted list — or, with
    the last form, a list that a policy found to pay as well (``0 0 1`` for ``0 1 1``): that is left in as an object of
    study. ``status`` is ``ok`` for the sorted list only.

    The gold answer is the list as text, ``0 1 2 3``, in any order. The numbers of a completion are read from the last
    ``\boxed{…}``, else from the last ``<answer>``, else from the whole text, with anything between them; if no gold
    number has two digits or a sign, each digit is a number. Numbers after the first L cost a point each, so that a
    longer list cannot collect more.

    From Stanford CS336 (2025), lecture 17.
    """

    name: str = "sorting"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right; suits ``distance`` only."""
    credit: Literal["distance", "inclusion_order", "inclusion_order_simple"] = "inclusion_order"
    """What earns points."""

    def __post_init__(self) -> None:
        if self.credit not in ("distance", "inclusion_order", "inclusion_order_simple"):
            raise ValueError(
                f"credit must be 'distance', 'inclusion_order' or 'inclusion_order_simple', got {self.credit!r}."
            )

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [self._one(c, a) for c, a in zip(completions, answers, strict=True)]

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if read_numbers(gold, single_digits=False) else "no numbers" for gold in golds]

    def _one(self, completion: str, gold_text: str) -> Score:
        gold = sorted(read_numbers(gold_text, single_digits=False))
        if not gold:
            return Score(None, "bad_gold", "no numbers")
        text = last_boxed(completion) or answer_block(completion) or completion
        numbers = read_numbers(text, single_digits=all(0 <= x <= 9 for x in gold))
        if not numbers:
            return Score(0.0, "no_answer", "no numbers")
        points = self._points(gold, numbers[: len(gold)]) - max(0, len(numbers) - len(gold))
        most = len(gold) if self.credit == "distance" else 2 * len(gold) - 1
        shown = " ".join(map(str, numbers[: len(gold) + 1]))[:80]
        return Score(max(0, points) / most, "ok" if numbers == gold else "wrong", shown)

    def _points(self, gold: list[int], answer: list[int]) -> int:
        if self.credit == "distance":
            return distance_points(gold, answer)
        include = inclusion_points if self.credit == "inclusion_order" else simple_inclusion_points
        return include(gold, answer) + order_points(answer)
