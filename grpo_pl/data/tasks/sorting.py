"""Sorting a few digits: a task without words, where partial credit and its loopholes can be watched."""

from __future__ import annotations

import random
from dataclasses import dataclass

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class SortingPrompts(GeneratedPrompts):
    """Digits such as ``3120``, to be answered by ``0123``; digits may repeat. To a tokenizer of characters, question
    and completion are ``length`` tokens each. The gold answer is a list, ``0 1 2 3``, as ``SortingReward`` reads it."""

    length: int = 4
    """Digits of a sequence."""
    symbols: int = 10
    """Number of different digits: 0 … ``symbols`` − 1."""

    def __post_init__(self) -> None:
        if not 2 <= self.length <= 12:
            raise ValueError(f"sorting needs a length between 2 and 12, got {self.length}.")
        if not 2 <= self.symbols <= 10:
            raise ValueError(f"sorting needs between 2 and 10 symbols, got {self.symbols}.")

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return prompt.answer.replace(" ", "")

    def draw(self, rng: random.Random) -> Problem:
        """With equal chances among all sequences."""
        digits = [rng.randrange(self.symbols) for _ in range(self.length)]
        question = "".join(map(str, digits))
        return Problem(id=int(question), question=question, answer=" ".join(map(str, sorted(digits))))

    def how_to_get_more(self) -> str:
        return f"raise length ({self.length}) or symbols ({self.symbols}), or ask for fewer."
