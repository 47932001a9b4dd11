"""One-line Python functions made up on the spot: operations on a number, in words, with tests of the result."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import ClassVar

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.types import Problem

SIGNS = {"add": "+", "minus": "-", "times": "*"}
TRIED = (-4, 0, 1, 7)
"""The arguments of the tests."""


@dataclass(kw_only=True)
class OneLinerPrompts(GeneratedPrompts):
    """Problems such as ``add 3, times 5``, solved by ``def f(x): return (x+3)*5``; for ``CodeReward``.

    Some demonstrations are careless: they leave out the brackets, which is wrong where a product follows a sum.
    """

    operations: int = 3
    """Operations on the number."""
    careless_share: float = 0.7
    """Share of demonstrations that leave out brackets."""

    MORE: ClassVar[str] = "use more operations than {operations}, or ask for fewer."

    def __post_init__(self) -> None:
        check_within("[1, 6]", "data.source", operations=self.operations)
        check_within("[0, 1]", "data.source", careless_share=self.careless_share)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        careless = rng.random() < self.careless_share
        return f"```python\ndef f(x): return {_expression(_parse(prompt.question), brackets=not careless)}\n```"

    def draw(self, rng: random.Random) -> Problem:
        """Products as often as sums and differences together; numbers from 2 to 9."""
        steps = [(rng.choice(("add", "minus", "times", "times")), rng.randint(2, 9)) for _ in range(self.operations)]
        identity = 0
        for word, number in steps:
            identity = 30 * identity + 10 * list(SIGNS).index(word) + number
        tests = []
        for x in TRIED:
            value = x
            for word, number in steps:
                value = {"add": value + number, "minus": value - number, "times": value * number}[word]
            tests.append(f"assert f({x}) == {value}")
        question = ", ".join(f"{word} {number}" for word, number in steps)
        return Problem(id=identity, question=question, answer=json.dumps(tests))


def _parse(question: str) -> list[tuple[str, int]]:
    return [(word, int(number)) for word, number in (part.split() for part in question.split(", "))]


def _expression(steps: list[tuple[str, int]], *, brackets: bool) -> str:
    text, is_sum = "x", False
    for word, number in steps:
        if word == "times" and is_sum and brackets:
            text = f"({text})"
        text += f"{SIGNS[word]}{number}"
        is_sum = word != "times"
    return text
