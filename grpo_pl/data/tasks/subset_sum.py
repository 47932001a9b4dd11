"""Subset sum, listed in code, with demonstrations: written searches over pairs and triples, most of which give up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from grpo_pl.data.tasks.searches import Line, SearchPrompts


@dataclass(kw_only=True)
class SubsetSumPrompts(SearchPrompts):
    """Problems such as ``12 9 7 4 2:23``: two or three of these numbers that add up to 23. For `SubsetSumReward`.

    A line is one pair of numbers: ``9+7=16,16+4=20,16+2=18`` has its sum, and the sum with each number behind the pair.
    Ten lines for five numbers.
    """

    size: int = 5
    """How many different numbers there are to choose from."""
    largest: int = 12
    """The numbers lie between 1 and this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 3 <= self.size <= 6:  # the number of a problem has to fit into 64 bits
            raise ValueError(f"size must lie between 3 and 6, got {self.size}.")
        if not self.size <= self.largest <= 16:
            raise ValueError(f"largest must lie between size ({self.size}) and 16, got {self.largest}.")

    def number_lists(self) -> Iterable[tuple[int, ...]]:
        return combinations(range(self.largest, 0, -1), self.size)

    def targets(self, numbers: Sequence[int]) -> Iterable[int]:
        return {value for line in self.search(numbers) for value in line.hits}

    def search(self, numbers: Sequence[int]) -> list[Line]:
        return [_line(numbers[i], numbers[j], numbers[j + 1 :]) for i, j in combinations(range(len(numbers)), 2)]


def _line(first: int, second: int, further: Sequence[int]) -> Line:
    pair, value = f"{first}+{second}", first + second
    text = f"{pair}={value}"
    hits, guesses = {value: (text, pair)}, [pair]
    for third in further:
        text += f",{value}+{third}={value + third}"
        guesses.append(f"{pair}+{third}")
        hits[value + third] = text, guesses[-1]
    return Line(text, hits, tuple(guesses))
