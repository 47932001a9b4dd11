"""Sorting a few digits: a task without words, where partial credit and its loopholes can be watched."""

from __future__ import annotations

import random
from dataclasses import dataclass

from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

HELD_OUT_SHARE = 10
"""One sequence in this many is held out, by a hash of the sequence itself."""


@dataclass(kw_only=True)
class SortingPrompts(PromptSource):
    """Digits such as ``3120``, to be answered by ``0123``; digits may repeat. To a tokenizer of characters, question
    and completion are ``length`` tokens each. The gold answer is a list, ``0 1 2 3``, as ``SortingReward`` reads it.
    A sequence is held out or not by its own hash, so the splits cannot overlap."""

    length: int = 4
    """Digits of a sequence."""
    symbols: int = 10
    """How many different digits there are: 0 … ``symbols`` − 1."""
    seed: int = 0
    """Names the order of the training sequences and the choice of the held-out ones."""

    def __post_init__(self) -> None:
        if not 2 <= self.length <= 12:
            raise ValueError(f"sorting needs a length between 2 and 12, got {self.length}.")
        if not 2 <= self.symbols <= 10:
            raise ValueError(f"sorting needs between 2 and 10 symbols, got {self.symbols}.")

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return self._distinct("train", row_key(self.seed, "train", step, attempt), count)

    def validation(self, count: int | None = None) -> list[Problem]:
        return self._distinct("val", row_key(self.seed, "val"), 200 if count is None else count)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return prompt.answer.replace(" ", "")

    def _distinct(self, split: str, seed: int, count: int) -> list[Problem]:
        """Draws with equal chances among all sequences of the split, each at most once per call."""
        rng = random.Random(seed)
        found: dict[int, Problem] = {}
        for _ in range(1000 * count):
            digits = [rng.randrange(self.symbols) for _ in range(self.length)]
            question = "".join(map(str, digits))
            identity = int(question)
            if identity not in found and self._is_held_out(identity) == (split == "val"):
                found[identity] = Problem(id=identity, question=question, answer=" ".join(map(str, sorted(digits))))
                if len(found) == count:
                    return list(found.values())
        raise ValueError(
            f"only {len(found)} different {split} sequences found where {count} were asked for: raise length "
            f"({self.length}) or symbols ({self.symbols}), or ask for fewer."
        )

    def _is_held_out(self, identity: int) -> bool:
        return row_key(self.seed, "split", identity) % HELD_OUT_SHARE == 0
