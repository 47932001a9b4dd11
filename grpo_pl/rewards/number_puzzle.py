"""``NumberPuzzleReward``: what rewards of puzzles with given numbers and a target share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score
from grpo_pl.rewards.places import boxed_or_block

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
_SIGNS = {
    "×": "*",
    "·": "*",
    "⋅": "*",
    "∙": "*",
    "∗": "*",
    "÷": "/",
    "∕": "/",
    "−": "-",
    "–": "-",
    "＝": "=",
    **dict(zip("＋＊／（）", "+*/()", strict=True)),
}
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)", re.ASCII)


@dataclass(kw_only=True)
class NumberPuzzleReward(Reward):
    r"""Judges answers about the numbers of the column ``numbers``, with the target as gold answer.

    The answer is read after the thoughts: the content of the last ``\boxed{…}``, else of the last ``<answer>``. It may
    be written in LaTeX, and may end in ``=`` and the target. One of more than 200 characters is ``too_long``.
    """

    name: str
    """Key of this reward in metrics, tables and files."""
    correctness: bool = True
    """True for the one reward per config that says whether an answer is right."""

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
        if not answer:
            return Score(0.0, "no_answer")
        if len(answer) > MOST_CHARACTERS:
            return Score(0.0, "too_long", f"{len(answer)} characters")
        left, *right = plain_signs(answer).split("=")
        if len(right) > 1 or not all(_is_whole(side) for side in right):
            return Score(0.0, "wrong", "more than an equation with the target at its end")
        if any(int(side) != target for side in right):
            return Score(0.0, "wrong", f"says {int(right[0])} instead of {target}"[:80])
        return self.judge(left.strip(), target, given)


def plain_signs(answer: str) -> str:
    r"""``answer`` with ``* / - =`` for their signs in LaTeX and Unicode, ``((a)/(b))`` for ``\frac{a}{b}`` and round
    brackets for those of LaTeX; what is none of these stays."""
    text = "".join(_SIGNS.get(character, character) for character in answer)
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
