"""Subset sum, listed in code, with demonstrations: written searches over pairs and triples, most of which give up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from grpo_pl.data.tasks.searches import Line, SearchPrompts, Step
from grpo_pl.functional.argument_checks import check_within


@dataclass(kw_only=True)
class SubsetSumPrompts(SearchPrompts):
    """Problems such as ``12 09 07 04 02:23``: two or three of these numbers that add up to 23. For `SubsetSumReward`.

    A line is one pair of numbers: ``e 09+07=16<>04:20=<02:18<>`` has its sum, and the sum with each number behind the
    pair. Ten lines for five numbers.
    """

    size: int = 5
    """Number of different numbers to choose from."""
    largest: int = 12
    """The numbers lie between 1 and this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("[3, 6]", "data.source", size=self.size)
        check_within(f"[{self.size}, 16]", "data.source", largest=self.largest)

    @property
    def largest_target(self) -> int:
        return 3 * self.largest

    def targets(self, numbers: Sequence[int]) -> set[int]:
        return super().targets(numbers) - set(numbers)  # those would be copied

    def number_lists(self) -> Iterable[tuple[int, ...]]:
        return combinations(range(self.largest, 0, -1), self.size)

    def search(self, numbers: Sequence[int]) -> list[Line]:
        return [self._line(numbers[i], numbers[j], numbers[j + 1 :]) for i, j in combinations(range(len(numbers)), 2)]

    def _line(self, first: int, second: int, further: Sequence[int]) -> Line:
        pair = f"{self.written(first)}+{self.written(second)}"
        steps = [Step(f"{pair}=", first + second, pair)]
        for third in map(self.written, further):
            steps.append(Step(f"{third}:", first + second + int(third), f"{pair}+{third}"))
        return Line(steps, [str(step.answer) for step in steps])
