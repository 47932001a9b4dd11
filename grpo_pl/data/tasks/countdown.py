"""Countdown with three numbers, listed in code, with demonstrations: written searches most of which give up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from grpo_pl.data.tasks.searches import Line, SearchPrompts, Step
from grpo_pl.functional.argument_checks import check_within

OPERATIONS = "+-*"


@dataclass(kw_only=True)
class CountdownPrompts(SearchPrompts):
    """Problems such as ``12 07 03:36``: reach 36 by ``+ - *`` with each number used once. For `CountdownReward`.

    A line is one pair of numbers: ``b 12-07=05,03:08<>02<<15<<`` has its result, the number that is left, and what that
    makes of the result by ``+``, ``-`` and ``*``; of a difference the larger number comes first. A result above
    ``limit`` is not gone on with. Every pair comes with every operation: nine lines.
    """

    largest: int = 20
    """The numbers lie between 1 and this."""
    limit: int = 59
    """Largest target, and largest value on the way to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("[3, 50]", "data.source", largest=self.largest)
        check_within(f"[{self.largest}, 999]", "data.source", limit=self.limit)

    @property
    def largest_target(self) -> int:
        return self.limit

    def number_lists(self) -> Iterable[tuple[int, ...]]:
        return combinations_with_replacement(range(self.largest, 0, -1), 3)

    def search(self, numbers: Sequence[int]) -> list[Line]:
        first, second, third = numbers
        pairs = ((first, second, third), (first, third, second), (second, third, first))
        return [self._line(one, other, operation, left) for one, other, left in pairs for operation in OPERATIONS]

    def _line(self, first: int, second: int, operation: str, left: int) -> Line:
        if operation == "-":
            first, second = max(first, second), min(first, second)
        pair, value = f"{self.written(first)}{operation}{self.written(second)}", _result(first, operation, second)
        last = self.written(left)
        guesses = [
            f"{last}-({pair})" if each == "-" and value < left else f"({pair}){each}{last}" for each in OPERATIONS
        ]
        steps = [Step(f"{pair}=", value, None)]
        if value <= self.limit:
            results = [_result(value, each, left) for each in OPERATIONS]
            steps += map(Step, (f",{last}:", "", ""), results, guesses)
        return Line(steps, guesses)


def _result(first: int, operation: str, second: int) -> int:
    return {"+": first + second, "-": abs(first - second), "*": first * second}[operation]
