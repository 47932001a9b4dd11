"""Rewards of puzzles with given numbers and a target: ``CountdownReward`` and ``SubsetSumReward``."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score, not_judged
from grpo_pl.rewards.completion_text import boxed_or_block
from grpo_pl.rewards.sandbox.gym_guards import calculate
from grpo_pl.rewards.sorting import read_numbers

COLUMN = "numbers"
"""Column with the numbers of the problem, a list of integers."""
MOST_CHARACTERS = 200
"""Longer answers are not read."""
_PLAIN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|textstyle)(?![A-Za-z])|\\[()\[\]]|\$|\{\s*\}", ""),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s", " "),
    ]
]
_SIGNS = str.maketrans("×·⋅∙∗＊÷∕／−–＝＋（）", "******///--=+()")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_BRACKETS = str.maketrans("[]{}", "()()")
_NO_EXPRESSION = re.compile(r"[^0-9+\-*/() ]|\*\*|//|(?:^|[-+*/(]) *[-+]")
"""Other characters, powers, roundings, and signs: there are no numbers below 0."""


@dataclass(kw_only=True)
class NumberPuzzleReward(Reward):
    r"""Judges answers about the numbers of the column ``numbers``, with the target as gold answer.

    The answer is read after the thoughts: the content of the last ``\boxed{…}``, else of the last ``<answer>``. It may
    be written in LaTeX, and may end in ``=`` and the target, and in a full stop. One of more than 200 characters is
    ``too_long``.
    """

    correctness: bool = True

    @abstractmethod
    def judge(self, answer: str, target: int, given: Sequence[int]) -> Score:
        """The score of an answer in plain signs (see `plain_signs`), without the ``= target`` at its end."""

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if _is_whole(gold) else "the target is no whole number" for gold in golds]

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        if COLUMN not in columns:
            raise MissingColumn(f"reward {self.name!r} needs the column {COLUMN!r}: the numbers of each problem.")
        rows = zip(completions, answers, columns[COLUMN], self.gold_faults(answers), strict=True)
        return [
            Score(None, "bad_gold", fault) if fault else self._score(boxed_or_block(text), int(gold), given)
            for text, gold, given, fault in rows
        ]

    def _score(self, answer: str, target: int, given: Any) -> Score:
        if given is None:
            return Score(None, "bad_gold", f"no column {COLUMN!r}")
        if not isinstance(given, list | tuple) or not all(type(number) is int for number in given):
            raise MissingColumn(f"reward {self.name!r}: the column {COLUMN!r} must list whole numbers, got {given!r}.")
        if score := not_judged(answer, MOST_CHARACTERS):
            return score
        left, *right = plain_signs(answer).rstrip().removesuffix(".").split("=")
        if len(right) > 1 or not all(_is_whole(side) for side in right):
            return Score(0.0, "wrong", "more than an equation with the target at its end")
        if any(int(side) != target for side in right):
            return Score(0.0, "wrong", f"says {int(right[0])} instead of {target}"[:80])
        return self.judge(left.strip(), target, given)


@dataclass(kw_only=True)
class CountdownReward(NumberPuzzleReward):
    r"""1 if the answer is an expression of the given numbers, each used exactly once, that equals the target; else 0.

    The answer is read after the thoughts: the content of the last ``\boxed{…}``, else of the last ``<answer>``. It may
    hold whole numbers, ``+ - * /`` and brackets, ``07`` being 7, their signs in LaTeX (``\times``, ``\cdot``, ``\div``,
    ``\frac{a}{b}``), and at its end ``=`` and the target, and a full stop; nothing else. It is evaluated exactly, in
    fractions. The target is the gold answer, the numbers are the column ``numbers``; over 200 characters are
    ``too_long``.
    """

    trusted = True
    name: str = "countdown"

    def judge(self, answer: str, target: int, given: Sequence[int]) -> Score:
        read = evaluate(answer)
        if read is None:
            return Score(0.0, "wrong", "no expression of whole numbers")
        value, used = read
        if sorted(used) != sorted(given):
            return Score(0.0, "wrong", f"uses {listed(used)} of {listed(given)}")
        if value != target:
            return Score(0.0, "wrong", f"{value} instead of {target}"[:80])
        return Score(1.0, "ok", str(value)[:80])


@dataclass(kw_only=True)
class SubsetSumReward(NumberPuzzleReward):
    r"""1 if the answer chooses some of the given numbers, none more often than it is there, that add up to the target;
    else 0.

    The answer is read after the thoughts: the content of the last ``\boxed{…}``, else of the last ``<answer>``: whole
    numbers with ``+``, commas or spaces between them, and at its end maybe ``=`` and the target, and a full stop. The
    target is the gold answer, the numbers are the column ``numbers``. An answer of more than 200 characters is
    ``too_long``.
    """

    trusted = True
    name: str = "subset_sum"

    def judge(self, answer: str, target: int, given: Sequence[int]) -> Score:
        chosen = read_numbers(answer.replace("+", ","), single_digits=False)
        if not chosen:
            return Score(0.0, "wrong", "no whole numbers with + between them")
        if Counter(chosen) - Counter(given):
            return Score(0.0, "wrong", f"chooses {listed(chosen)} of {listed(given)}")
        if sum(chosen) != target:
            return Score(0.0, "wrong", f"{sum(chosen)} instead of {target}"[:80])
        return Score(1.0, "ok", listed(chosen))


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and its numbers from left to right; None if it is none, or divides by 0."""
    plain = text.translate(_BRACKETS)
    if _NO_EXPRESSION.search(plain):
        return None
    try:
        return calculate(_LEADING_ZEROS.sub("", plain), exact=True), list(map(int, re.findall(r"\d+", plain)))
    except (ValueError, ZeroDivisionError):
        return None


def plain_signs(answer: str) -> str:
    r"""``answer`` with ``* / - =`` for their signs in LaTeX and Unicode, ``((a)/(b))`` for ``\frac{a}{b}`` and round
    brackets for those of LaTeX; what is none of these stays."""
    text = answer.translate(_SIGNS)
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    while (fewer := _FRACTION.sub(lambda f: f"(({f[1].strip('{}')})/({f[2].strip('{}')}))", text)) != text:
        text = fewer
    return text


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a score's detail."""
    return " ".join(map(str, numbers))[:80] or "nothing"


def _is_whole(text: str) -> bool:
    digits = text.strip().removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= MOST_CHARACTERS
