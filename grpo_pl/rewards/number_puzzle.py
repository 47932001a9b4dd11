"""``NumberPuzzleReward``: what rewards of puzzles with given numbers and a target share."""

from __future__ import annotations

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


@dataclass(kw_only=True)
class NumberPuzzleReward(Reward):
    r"""Judges answers about the numbers of the column ``numbers``, with the target as gold answer.

    The answer is the content of the last ``\boxed{…}``, else of the last ``<answer>``; one of more than 200 characters
    is ``too_long``.
    """

    name: str
    """Key of this reward in metrics, tables and files."""
    correctness: bool = True
    """True for the one reward per config that says whether an answer is right."""

    @abstractmethod
    def judge(self, answer: str, target: int, given: Sequence[int]) -> Score:
        """The score of an answer that is not empty."""

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if _is_whole(gold) else "the target is no whole number" for gold in golds]

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        if COLUMN not in columns:
            raise MissingColumn(f"reward {self.name!r} needs the column {COLUMN!r}: the numbers of each problem.")
        rows = zip(completions, answers, columns[COLUMN], self.gold_faults(answers), strict=True)
        return [
            Score(None, "bad_gold", fault) if fault else self._score(boxed_or_block(text).strip(), int(gold), given)
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
        return self.judge(answer, target, given)


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a score's detail."""
    return " ".join(map(str, numbers))[:80] or "nothing"


def _is_whole(text: str) -> bool:
    digits = text.strip().removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= MOST_CHARACTERS
