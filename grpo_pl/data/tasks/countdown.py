"""Countdown with three numbers, listed in code, with demonstrations: written searches most of which give up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

from grpo_pl.data.tasks.searches import Line, SearchPrompts

OPERATIONS = "+-*"


@dataclass(kw_only=True)
class CountdownPrompts(SearchPrompts):
    """Problems such as ``12 7 3:36``: reach 36 by ``+ - *`` with each of the numbers used once. For `CountdownReward`.

    A line is one pair of numbers: ``12-7=5,5+3=8,5-3=2,5*3=15`` has its result, and what the number that is left makes
    of that by ``+``, ``-`` and ``*``; of a difference the larger number comes first. ``.`` stands for a value above
    ``limit``, with which nothing is tried. Every pair comes with every operation, nine lines at most.
    """

    largest: int = 20
    """The numbers lie between 1 and this."""
    limit: int = 60
    """Largest target, and largest value on the way to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 3 <= self.largest <= 50:
            raise ValueError(f"largest must lie between 3 and 50, got {self.largest}.")
        if not self.largest <= self.limit <= 999:
            raise ValueError(f"limit must lie between largest ({self.largest}) and 999, got {self.limit}.")

    def number_lists(self) -> Iterable[tuple[int, ...]]:
        return combinations_with_replacement(range(self.largest, 0, -1), 3)

    def targets(self, numbers: Sequence[int]) -> Iterable[int]:
        return {value for line in self.search(numbers) for value in line.hits if value}

    def search(self, numbers: Sequence[int]) -> list[Line]:
        pairs = {(numbers[i], numbers[j]): numbers[3 - i - j] for i, j in combinations(range(3), 2)}
        return [self._line(*pair, operation, left) for pair, left in pairs.items() for operation in OPERATIONS]

    def _line(self, first: int, second: int, operation: str, left: int) -> Line:
        pair, value = f"{first}{operation}{second}", _result(first, operation, second)
        guesses = {each: _ordered(f"({pair})", value, each, left) for each in OPERATIONS}
        text, hits = f"{pair}={self._shown(value)}", dict[int, tuple[str, str]]()
        for each, answer in guesses.items() if value <= self.limit else ():
            result = _result(value, each, left)
            text += f",{_ordered(value, value, each, left)}={self._shown(result)}"
            if result <= self.limit:
                hits.setdefault(result, (text, answer))
        return Line(text, hits, tuple(guesses.values()))

    def _shown(self, value: int) -> str:
        return str(value) if value <= self.limit else "."


def _result(first: int, operation: str, second: int) -> int:
    return {"+": first + second, "-": abs(first - second), "*": first * second}[operation]


def _ordered(written: int | str, value: int, operation: str, left: int) -> str:
    """A value, as it is written, and the number that is left; of a difference the larger one comes first."""
    return f"{left}-{written}" if operation == "-" and value < left else f"{written}{operation}{left}"
