"""``StrictAnswerReward`` and ``LenientAnswerReward``: two cheap judges on either side of the one that training uses."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from grpo_pl.rewards import answer_text as text
from grpo_pl.rewards.base import Reward, Score

_BOX = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(
    r"(?P<minus>-\s{0,3})?"
    r"(?P<number>\\[dtc]?frac\s*(?:\{\s*-?\d+\s*\}|\d)\s*(?:\{\s*-?\d+\s*\}|\d)|\d[\d,]*(?:\.\d+)?(?:\s{0,3}/\s{0,3}\d+)?)"
)
_NEARLY = Fraction(1, 10**4)
"""How far a number in the text may be from the gold one, relative to it, for the lenient judge."""


def boxed_answers(completion: str) -> list[str]:
    r"""What every ``\boxed{…}`` holds, in order and with braces matched; an inner box stands for the one around it.

    Empty if the last box is not closed: a text that was cut off there has given no answer.
    """
    starts = [match.start() for match in _BOX.finditer(completion)]
    found = [text.last_boxed(completion[a:b]) for a, b in pairwise([*starts, len(completion)])]
    return [] if not found or found[-1] is None else [answer.strip() for answer in found if answer is not None]


def normal_form(answer: str) -> Hashable:
    """One value for all spellings of an answer: a written-out number by value, anything else by its symbols.

    A quotient that is left to be divided is not the number it comes to.
    """
    form = text.canonical(answer)
    number = text.read_number(form)
    return (number.value, number.quotient) if number is not None else re.sub(r"\s+", "", form)


@dataclass(kw_only=True)
class StrictAnswerReward(Reward):
    r"""1 if the text behind the last ``</think>`` boxes the gold answer, and no other; range {0, 1}.

    Answers are equal if they are the same symbols, typography aside, or the same written-out number to the last digit.
    There is no algebra, no tolerance and no unit: ``x+1`` is not ``1+x``, ``0.5`` is not ``1/2``. Two boxes of
    different content are no answer. It therefore refuses some right answers, but there is little in it to be fooled.
    """

    name: str = "strict"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right."""

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [self._one(c, a) for c, a in zip(completions, answers, strict=True)]

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if gold.strip() else "empty" for gold in golds]

    @staticmethod
    def _one(completion: str, gold: str) -> Score:
        if not gold.strip():
            return Score(None, "bad_gold", "empty")
        boxes = boxed_answers(completion.rpartition("</think>")[2])
        if not boxes or not boxes[-1]:
            return Score(0.0, "no_answer")
        if len(boxes[-1]) > len(gold) + 1000:
            return Score(0.0, "too_long", f"{len(boxes[-1])} characters")
        if len({normal_form(box) for box in boxes}) > 1:
            return Score(0.0, "wrong", f"{len(boxes)} boxes that differ")
        same = normal_form(boxes[-1]) == normal_form(gold)
        return Score(1.0 if same else 0.0, "ok" if same else "wrong")


@dataclass(kw_only=True)
class LenientAnswerReward(Reward):
    """1 if the gold answer stands anywhere in the text, boxed or not, else 0; range {0, 1}.

    A number is looked for by value, to four digits, among all numbers of the text; anything else by its symbols,
    typography and spaces aside. Mentioning the answer is enough, so listing candidates is worth 1: never train on
    this. What even this judge refuses holds no sign of the gold answer.
    """

    name: str = "lenient"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right."""

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [self._one(c, a) for c, a in zip(completions, answers, strict=True)]

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if gold.strip() else "empty" for gold in golds]

    @staticmethod
    def _one(completion: str, gold: str) -> Score:
        if not gold.strip():
            return Score(None, "bad_gold", "empty")
        form = text.canonical(gold)
        number = text.read_number(form)
        if number is not None:
            near = _NEARLY * abs(number.value)
            found = any(abs(value - number.value) <= near for value in _numbers(completion))
        else:
            whole = text.canonical.__wrapped__(completion)  # past its cache, which is for answers and not for pages
            found = re.sub(r"\s+", "", form) in re.sub(r"\s+", "", whole)
        return Score(1.0 if found else 0.0, "ok" if found else "wrong")


def _numbers(completion: str) -> Iterator[Fraction]:
    """Every number of a text; behind a minus sign, which may be an operator, also its opposite."""
    for match in _NUMBER.finditer(completion.replace("−", "-")):
        whole = match["number"]
        parts = [whole] if _value(whole) is not None else whole.split(",")[:100]  # 1,2 is a list
        for part in parts:
            if (value := _value(part)) is not None:
                yield value
                if match["minus"]:
                    yield -value


def _value(piece: str) -> Fraction | None:
    number = text.read_number(text.canonical(piece)) if 0 < len(piece) <= 100 else None
    return None if number is None else number.value
