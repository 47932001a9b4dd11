"""Column arithmetic made up on the spot, with worked demonstrations: the quickstart's task."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class ArithmeticPrompts(GeneratedPrompts):
    """Problems such as ``347+285=``."""

    digits: int = 3
    """Most digits of an operand."""
    min_digits: int = 1
    """Fewest digits of an operand."""
    operators: str = "+"
    """Operations: any of ``+`` and ``-`` (the larger operand comes first)."""
    difficulty: Literal["any", "no_carry", "carry"] = "any"
    """Keep all problems, only those without a carry or borrow, or only those with at least one."""
    scratchpad_share: float = 0.5
    """Share of demonstrations with the calculation written out; the others guess the answer straight away."""
    solutions: bool = False
    """Give each problem a column ``solution``: its calculation and its answer."""

    MORE: ClassVar[str] = "use more digits than {digits}, another difficulty than {difficulty!r}, or a smaller batch."

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.digits <= 9:
            raise ValueError(f"need 1 <= min_digits <= digits <= 9, got {self.min_digits} and {self.digits}.")
        if not self.operators or set(self.operators) - set("+-"):
            raise ValueError(f"operators must be made of '+' and '-', got {self.operators!r}.")
        check_within("[0, 1]", "data.source", scratchpad_share=self.scratchpad_share)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        a, operator, b = _parse(prompt.question)
        work = "\n".join(scratchpad(a, operator, b)) + "\n" if rng.random() < self.scratchpad_share else ""
        return f"<think>{work}</think><answer>\\boxed{{{prompt.answer}}}</answer>"

    def draw(self, rng: random.Random) -> Problem | None:
        operator = rng.choice(self.operators)
        a, b = (rng.randrange(10 ** rng.randint(self.min_digits, self.digits)) for _ in range(2))
        if self.min_digits > 1 and min(a, b) < 10 ** (self.min_digits - 1):
            return None
        if operator == "-" and a < b:
            a, b = b, a
        carries = any(carry for *_, carry in _columns(a, operator, b))
        wanted = self.difficulty == "any" or carries == (self.difficulty == "carry")
        return _problem(a, operator, b, solution=self.solutions) if wanted else None

    def identity(self, problem: Problem) -> tuple[int | str, ...]:
        """a+b and b+a are one problem."""
        a, operator, b = _parse(problem.question)
        return min(a, b), operator, max(a, b)


def worked_lines(problem: Problem) -> list[str]:
    """The calculation of a problem, a line a column, see `scratchpad`."""
    return scratchpad(*_parse(problem.question))


def scratchpad(a: int, operator: str, b: int) -> list[str]:
    """One line a column, units first: ``7+5+0=12`` is digits, carry in, and their sum; ``3-5-1=7`` borrowed a ten."""
    return [f"{x}{operator}{y}{operator}{carry_in}={result}" for x, y, carry_in, result, _ in _columns(a, operator, b)]


def _columns(a: int, operator: str, b: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(digit of a, digit of b, carry in, written result, carry out) of each column, units first."""
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        if operator == "+":
            written, carry_out = x + y + carry, int(x + y + carry >= 10)
        else:
            written, carry_out = (x - y - carry) % 10, int(x - y - carry < 0)
        yield x, y, carry, written, carry_out
        carry = carry_out


def _problem(a: int, operator: str, b: int, *, solution: bool) -> Problem:
    answer = a + b if operator == "+" else a - b
    identity = 2 * (a * 10**9 + b) + (operator == "-")
    columns = {"solution": "\n".join([*scratchpad(a, operator, b), str(answer)])} if solution else {}
    return Problem(id=identity, question=f"{a}{operator}{b}=", answer=str(answer), columns=columns)


def _parse(question: str) -> tuple[int, str, int]:
    operator = "+" if "+" in question else "-"
    a, b = question.rstrip("=").split(operator)
    return int(a), operator, int(b)
