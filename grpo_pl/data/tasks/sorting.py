"""Sorting a few digits: a task without words, where partial credit and its loopholes can be watched."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class SortingPrompts(GeneratedPrompts):
    """Digits such as ``3120``, to be answered by ``0123``; digits may repeat. To a tokenizer of characters, question
    and completion are ``length`` tokens each. The gold answer is a list, ``0 1 2 3``, as ``SortingReward`` reads it."""

    length: int = 4
    """Digits of a sequence."""
    symbols: int = 10
    """Number of different digits: 0 … ``symbols`` − 1."""

    MORE: ClassVar[str] = "raise length ({length}) or symbols ({symbols}), or ask for fewer."

    def __post_init__(self) -> None:
        check_within("[2, 12]", "data.source", length=self.length)
        check_within("[2, 10]", "data.source", symbols=self.symbols)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return prompt.answer.replace(" ", "")

    def draw(self, rng: random.Random) -> Problem:
        """With equal chances among all sequences."""
        digits = [rng.randrange(self.symbols) for _ in range(self.length)]
        question = "".join(map(str, digits))
        return Problem(id=int(question), question=question, answer=" ".join(map(str, sorted(digits))))
