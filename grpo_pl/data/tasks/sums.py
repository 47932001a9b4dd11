"""Sums of several large numbers, made up on the spot: too hard for a tiny policy alone, easy with a tool."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class SumPrompts(GeneratedPrompts):
    """Problems such as ``347+85+912=``, for a ``ToolEnvironment`` whose tool ``calc`` is called in tags.

    A sum is held out or not by its terms, whatever their order, so the splits cannot overlap.
    """

    terms: int = 3
    """Numbers that are added up."""
    digits: int = 3
    """Digits of each number, the first of which is not 0."""
    tool_share: float = 0.4
    """Share of demonstrations that call the tool and then repeat its result; the others give the answer at once."""
    tool: str = "calc"
    """The tag that calls the tool."""

    MORE: ClassVar[str] = "use more digits than {digits} or terms than {terms}, or ask for fewer."

    def __post_init__(self) -> None:
        check_within("[2, 6]", "data.source", terms=self.terms)
        if not self.digits >= 1 or self.terms * self.digits > 18:  # the number of a sum has to fit into 64 bits
            raise ValueError(f"sums need 1 digit or more and terms * digits <= 18, got {self.terms} * {self.digits}.")
        check_within("[0, 1]", "data.source", tool_share=self.tool_share)

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> list[str]:
        answer = f"<answer>\\boxed{{{prompt.answer}}}</answer>"
        if rng.random() >= self.tool_share:
            return [answer]
        return [f"<{self.tool}>{prompt.question.rstrip('=')}</{self.tool}>", answer]

    def draw(self, rng: random.Random) -> Problem:
        """With equal chances among all sums."""
        numbers = [rng.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(self.terms)]
        identity = sum(number * 10 ** (self.digits * i) for i, number in enumerate(numbers))
        return Problem(id=identity, question="+".join(map(str, numbers)) + "=", answer=str(sum(numbers)))

    def identity(self, problem: Problem) -> tuple[str, ...]:
        """The sorted terms: a sum and its reorderings have one answer, so they are held out together."""
        return tuple(sorted(problem.question.rstrip("=").split("+")))
