"""``SearchPrompts``: the base of puzzles that are solved by a written search."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Literal, NamedTuple

from grpo_pl.data.rows import permuted
from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

HELD_OUT_NUMBERS = 6
"""One list of numbers in this many is held out."""
HELD_OUT_TARGETS = 6
"""One target in this many is held out."""
Split = Literal["train", "val"]
Puzzle = tuple[tuple[int, ...], int]
"""Numbers and the target."""


class Step(NamedTuple):
    """One value of a line."""

    before: str
    """Text before the value."""
    value: int
    answer: str | None
    """The answer that has this value; None where it is only on the way to one."""


class Line(NamedTuple):
    """One line of a search."""

    steps: Sequence[Step]
    guesses: Sequence[str]
    """Answers made of this line, whatever their value."""


@dataclass(kw_only=True)
class SearchPrompts(PromptSource):
    """Numbers and a target, to be reached by searching. A subclass says which puzzles there are and how to search.

    All puzzles are listed at the start and split twice: the numbers of a held-out problem stand together in no training
    problem, and its target is no training problem's; what is held out by one of the two alone is left out. Rollouts
    take the training problems in passes of random order, so that none comes twice in a pass; the numbers of a problem
    stand in another order in each.

    A demonstration writes line after line in the order of their letters, begins at any of them and goes round. Behind
    every value that could be an answer's it compares, digit by digit, with the target: below (``<``), above (``>``) or
    the same (``=``). At the target it stops and answers right; one that gives up before writes ``?`` and answers by a
    guess that is made of its last line. Every number has as many digits as the largest target, so that a policy which
    reads digits finds each at its place; points stand for a larger value.
    """

    give_up: float = 0.95
    """Chance of a demonstration to end behind a line that misses the target."""
    unlucky: float = 0.08
    """Share of the demonstrations that begin where the line that hits is farthest, and give up just before it: what
    stands far from the problem has to be seen, too, and the others end after a line or two."""
    seed: int = 0
    """Names the order of the training problems and the choice of the held-out ones."""
    _listed: dict[Split, list[Puzzle]] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_within("[0, 1]", "data.source", give_up=self.give_up, unlucky=self.unlucky)

    @property
    @abstractmethod
    def largest_target(self) -> int:
        """No target, and no value that is written, is larger."""

    @abstractmethod
    def number_lists(self) -> Iterable[tuple[int, ...]]:
        """All choices of numbers, once each, in whatever order."""

    @abstractmethod
    def search(self, numbers: Sequence[int]) -> list[Line]:
        """All lines of a search, in order."""

    def written(self, number: int) -> str:
        digits = len(str(self.largest_target))
        return f"{number:0{digits}d}" if number <= self.largest_target else "." * digits

    def compared(self, value: int, target: int) -> str:
        """A sign for each digit. One for the whole number has to be learned for every pair of numbers: a policy that
        never saw a target in training then missed it, or took another for it."""
        digits = zip(self.written(value), self.written(target), strict=True)
        return "".join("=" if mine == other else "<" if mine < other else ">" for mine, other in digits)

    def targets(self, numbers: Sequence[int]) -> set[int]:
        """Targets that these numbers can reach: the values of all answers, but for 0 and those too large."""
        values = {step.value for line in self.search(numbers) for step in line.steps if step.answer is not None}
        return {value for value in values if 0 < value <= self.largest_target}

    def thought(self, line: Line, target: int) -> tuple[str, str | None]:
        """A line as it is written in search of ``target``, and the right answer if it has one."""
        text = ""
        for step in line.steps:
            text += step.before + self.written(step.value)
            if step.answer is not None and step.value <= self.largest_target:
                text += self.compared(step.value, target)
                if step.value == target:
                    return text, step.answer
        return text, None

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        lines = self.search(prompt.columns["numbers"])
        shown = [self.thought(line, int(prompt.answer)) for line in lines]
        ahead = _ahead([answer is not None for _, answer in shown])
        if rng.random() < self.unlucky:
            longest = max(ahead)
            begin = rng.choice([place for place, missing in enumerate(ahead) if missing == longest])
            tried = max(1, longest)  # 1 where every line hits
        else:
            begin, tried = rng.randrange(len(lines)), 1
            while tried <= ahead[begin] and rng.random() >= self.give_up:
                tried += 1
        places = [(begin + number) % len(lines) for number in range(tried)]
        thoughts = [f"{ascii_lowercase[place]} {shown[place][0]}" for place in places]
        answer = shown[places[-1]][1]
        if answer is None:
            thoughts[-1] += "?"
            answer = rng.choice(lines[places[-1]].guesses)
        return "<think>" + "\n".join(thoughts) + f"</think><answer>{answer}</answer>"

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        puzzles = self._puzzles("train")
        if count > len(puzzles):
            raise ValueError(f"{count} training problems were asked for, and there are {len(puzzles)}.")
        turn, part = divmod(step, len(puzzles) // count)
        key = row_key(self.seed, "order", turn, attempt)
        places = range(part * count, (part + 1) * count)
        return [self._problem(puzzles[permuted(place, len(puzzles), key)], turn, attempt) for place in places]

    def validation(self, count: int | None = None) -> list[Problem]:
        puzzles = self._puzzles("val")
        if count is not None and count > len(puzzles):
            raise ValueError(f"{count} held-out problems were asked for, and there are {len(puzzles)}.")
        key = row_key(self.seed, "held out")
        chosen = range(len(puzzles) if count is None else count)
        return [self._problem(puzzles[permuted(place, len(puzzles), key)]) for place in chosen]

    def _puzzles(self, split: Split) -> list[Puzzle]:
        """All of a split, in a fixed order."""
        if not self._listed:
            self._listed |= {"train": [], "val": []}
            held_out = {target for target in range(1, self.largest_target + 1) if self._held_out(target)}
            for numbers in self.number_lists():
                apart = row_key(self.seed, "numbers", *numbers) % HELD_OUT_NUMBERS == 0
                for target in sorted(self.targets(numbers)):
                    if apart == (target in held_out):
                        self._listed["val" if apart else "train"].append((numbers, target))
        return self._listed[split]

    def _held_out(self, target: int) -> bool:
        """True if a target is held out: of those with the same last digit one in six.

        So the training targets keep every last digit; ``limit=59`` makes them keep every first one, too. By chance
        alone a seed held out nearly all that end in 0, and nobody notices a target whose digits were in none.
        """
        tens, last = divmod(target, 10)
        return (tens + permuted(last, 10, row_key(self.seed, "target"))) % HELD_OUT_TARGETS == 0

    def _problem(self, puzzle: Puzzle, *turn: int) -> Problem:
        """The numbers in an order of their own, another in each pass: what can be read off one order is not learned."""
        numbers, target = list(puzzle[0]), puzzle[1]
        identity = 0  # of the puzzle, whatever the order
        for number in (*numbers, target):
            identity = identity * (self.largest_target + 1) + number
        random.Random(row_key(self.seed, "numbers", *numbers, target, *turn)).shuffle(numbers)
        question = " ".join(map(self.written, numbers)) + f":{self.written(target)}"
        return Problem(id=identity, question=question, answer=str(target), columns={"numbers": numbers})


def _ahead(hits: Sequence[bool]) -> list[int]:
    """For each place how many lines that miss come before the next one that hits, going round."""
    twice = [*hits, *hits]
    return [twice.index(True, place) - place for place in range(len(hits))]
