"""``SortingReward``: partial credit for sorting a list of numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.rewards.base import PerCompletionReward, Score
from grpo_pl.rewards.completion_text import after_thinking, boxed_or_block
from grpo_pl.rewards.mathematics.canonical import MAX_DIGIT_RUN

Credit = Literal["distance", "inclusion_order", "inclusion_order_simple"]
_SEPARATORS = re.compile(
    r"[\s,;，、；()\[\]{}<≤→~$]|->|\\[,;:! ()\[\]{}]|\\(?:leq?|lt|to|left|right|q?quad)(?![a-zA-Z])|(?<!\w)and(?!\w)"
)
_LONG = re.compile(rf"\d{{{MAX_DIGIT_RUN + 1}}}")


def distance_points(gold: Sequence[int], answer: Sequence[int]) -> int:
    """Positions where the sorted list and the answer agree: Σ [x_i = y_i]; 0 … L."""
    return sum(x == y for x, y in zip(gold, answer, strict=False))


def inclusion_points(gold: Sequence[int], answer: Sequence[int]) -> int:
    """Numbers of the list found in the answer, each as often as it occurs in both: Σ min(count_x, count_y); 0 … L."""
    return (Counter(gold) & Counter(answer)).total()


def simple_inclusion_points(gold: Sequence[int], answer: Sequence[int]) -> int:
    """Numbers of the list that occur in the answer at all, so that one copy counts for all its duplicates; 0 … L."""
    named = set(answer)
    return sum(x in named for x in gold)


def order_points(answer: Sequence[int]) -> int:
    """Neighbours of the answer that are in order: Σ [y_i ≤ y_{i+1}]; 0 … L − 1."""
    return sum(x <= y for x, y in pairwise(answer))


def read_numbers(text: str, *, single_digits: bool) -> list[int] | None:
    """The integers that ``text`` lists; ``None`` if it holds anything but integers and separators.

    Numbers are separated by white space, commas, semicolons, brackets, ``<``, arrows, LaTeX spaces or ``and``; a full
    stop may end the list. With ``single_digits`` every digit is a number of its own, so ``0123`` is four.
    """
    listed = _SEPARATORS.sub(" ", text.replace("−", "-").strip().removesuffix(".")).split()
    number = r"\d+" if single_digits else r"-?\d+"
    if not all(re.fullmatch(number, piece) for piece in listed):
        return None
    return [int(piece) for piece in ("".join(listed) if single_digits else listed)]


@dataclass(kw_only=True)
class SortingReward(PerCompletionReward):
    r"""Partial credit for sorting L numbers, a denser signal than right or wrong.

    - ``distance``: positions that hold the right number.
    - ``inclusion_order``: numbers of the list that are present, counted as a multiset, plus neighbours in order.
    - ``inclusion_order_simple``: the same, but one copy of a number counts for all its duplicates.

    The points are divided by their maximum (L, or 2L − 1 for the last two), so the range is [0, 1] and the sorted list
    is worth 1. With ``inclusion_order_simple`` some other lists are worth 1 as well (``0 0 1`` for ``0 1 1``): a policy
    can learn to exploit this, and the form is kept to study that. ``status`` is ``ok`` for the sorted list only.

    The gold answer is the list as text, ``0 1 2 3``, in any order. The list of a completion is read from the text after
    its thoughts: from the last ``\boxed{…}``, else from the last ``<answer>``, else from all of it. It may hold numbers
    and separators only; with words, signs or decimal points it is no list and worth 0. If no gold number has two digits
    or a sign, each digit is a number. Numbers after the first L cost a point each, so that a longer list cannot earn
    more. A number of more than 400 digits is ``too_long``. As the correctness reward use ``distance``.

    From Stanford CS336 (2025), lecture 17.
    """

    trusted = True
    name: str = "sorting"
    credit: Credit = "inclusion_order"
    """The formula of the points, see above."""

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, Credit)

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if _gold_numbers(gold) else "no list of numbers" for gold in golds]

    def score(self, completion: str, gold: str) -> Score:
        wanted = _gold_numbers(gold)
        single_digits = all(0 <= x <= 9 for x in wanted)
        said = after_thinking(completion)
        stated = boxed_or_block(completion) if "\\boxed" in said or "<answer>" in said else said
        if not single_digits and _LONG.search(stated):
            return Score(0.0, "too_long", f"a number of more than {MAX_DIGIT_RUN} digits")
        numbers = read_numbers(stated, single_digits=single_digits)
        if not numbers:
            some = re.search(r"\d", stated)
            return Score(0.0, "wrong", "not only numbers") if some else Score(0.0, "no_answer", "no numbers")
        points, most, judged = -max(0, len(numbers) - len(wanted)), len(wanted), numbers[: len(wanted)]
        if self.credit == "distance":
            points += distance_points(wanted, judged)
        else:
            include = inclusion_points if self.credit == "inclusion_order" else simple_inclusion_points
            points += include(wanted, judged) + order_points(judged)
            most += len(wanted) - 1
        shown = " ".join(map(str, numbers[: len(wanted) + 1]))[:80]
        return Score(max(0, points) / most, "ok" if numbers == wanted else "wrong", shown)


def _gold_numbers(gold: str) -> list[int]:
    """The numbers of a gold list, sorted; empty if it cannot be read."""
    return [] if _LONG.search(gold) else sorted(read_numbers(gold, single_digits=False) or [])
