"""``SearchPrompts``: what puzzles that are solved by a written search share, so that each adds its own lines alone."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from grpo_pl.data.rows import permuted
from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

HELD_OUT_NUMBERS = 6
"""One list of numbers in this many is held out."""
HELD_OUT_TARGETS = 5
"""One target in this many is held out."""
Split = Literal["train", "val"]
Puzzle = tuple[tuple[int, ...], int]
"""Numbers, the larger ones first, and the target."""


class Line(NamedTuple):
    """One line of a search."""

    text: str
    """All of it, as it is written where it misses the target."""
    hits: dict[int, tuple[str, str]]
    """Value -> the line up to it, and the answer that reaches it; each value at its first place."""
    guesses: tuple[str, ...]
    """Answers made of this line, whatever their value."""


@dataclass(kw_only=True)
class SearchPrompts(PromptSource):
    """Numbers and a target, to be reached by searching. A subclass says which puzzles there are and how to search.

    All puzzles are listed at the start and split twice: the numbers of a held-out problem stand together in no training
    problem, and its target is no training problem's; what is held out by one of the two alone is left out. Rollouts
    take the training problems in passes of random order, so that none comes twice in a pass.

    A demonstration writes line after line in one order, begins at any of them and goes round. It ends with ``!`` at the
    target and then answers right; behind each line that misses it, it gives up with probability ``give_up``, writes
    ``?`` and answers by a guess that is made of the last line.
    """

    give_up: float = 0.7
    """Chance of a demonstration to end behind a line that misses the target."""
    seed: int = 0
    """Names the order of the training problems and the choice of the held-out ones."""
    _listed: dict[Split, list[Puzzle]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.give_up <= 1.0:
            raise ValueError(f"give_up must lie in [0, 1], got {self.give_up}.")

    @abstractmethod
    def number_lists(self) -> Iterable[tuple[int, ...]]:
        """All lists of numbers, each with the larger ones first."""

    @abstractmethod
    def targets(self, numbers: Sequence[int]) -> Iterable[int]:
        """What can be asked of these numbers."""

    @abstractmethod
    def search(self, numbers: Sequence[int]) -> list[Line]:
        """All lines of a search, in order; one of them at least reaches each target."""

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        lines, target = self.search(prompt.columns["numbers"]), int(prompt.answer)
        begin = rng.randrange(len(lines))
        thoughts: list[str] = []
        for line in [*lines[begin:], *lines[:begin]]:
            if target in line.hits:
                text, answer = line.hits[target]
                return _completion([*thoughts, f"{text}!"], answer)
            thoughts.append(line.text)
            if rng.random() < self.give_up:
                break
        return _completion([*thoughts[:-1], f"{thoughts[-1]}?"], rng.choice(line.guesses))

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        puzzles = self._puzzles("train")
        if count > len(puzzles):
            raise ValueError(f"{count} training problems were asked for, and there are {len(puzzles)}.")
        turn, part = divmod(step, len(puzzles) // count)
        key = row_key(self.seed, "order", turn, attempt)
        places = range(part * count, (part + 1) * count)
        return [_problem(puzzles[permuted(place, len(puzzles), key)]) for place in places]

    def validation(self, count: int | None = None) -> list[Problem]:
        puzzles = self._puzzles("val")
        if count is not None and count > len(puzzles):
            raise ValueError(f"{count} held-out problems were asked for, and there are {len(puzzles)}.")
        key = row_key(self.seed, "held out")
        chosen = range(len(puzzles) if count is None else count)
        return [_problem(puzzles[permuted(place, len(puzzles), key)]) for place in chosen]

    def _puzzles(self, split: Split) -> list[Puzzle]:
        """All of a split, in a fixed order."""
        if not self._listed:
            self._listed |= {"train": [], "val": []}
            for numbers in self.number_lists():
                apart = row_key(self.seed, "numbers", *numbers) % HELD_OUT_NUMBERS == 0
                for target in sorted(self.targets(numbers)):
                    if apart == (row_key(self.seed, "target", target) % HELD_OUT_TARGETS == 0):
                        self._listed["val" if apart else "train"].append((numbers, target))
        return self._listed[split]


def _problem(puzzle: Puzzle) -> Problem:
    numbers, target = puzzle
    identity = 0
    for number in (*numbers, target):
        identity = identity * 1000 + number
    question = " ".join(map(str, numbers)) + f":{target}"
    return Problem(id=identity, question=question, answer=str(target), columns={"numbers": list(numbers)})


def _completion(thoughts: Sequence[str], answer: str) -> str:
    return "<think>" + "\n".join(thoughts) + f"</think><answer>{answer}</answer>"
