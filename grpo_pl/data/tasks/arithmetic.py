"""Column arithmetic made up on the spot, with worked demonstrations: the quickstart's task."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

HELD_OUT_SHARE = 10
"""One problem in this many is held out, by a hash of the problem itself."""
ALL = 200
"""Most held-out problems that are made when no number is asked for."""


@dataclass(kw_only=True)
class ArithmeticPrompts(PromptSource):
    """Problems such as ``347+285=``. A problem is held out or not by its own hash, so the splits cannot overlap."""

    digits: int = 3
    """Most digits of an operand."""
    min_digits: int = 1
    """Fewest digits of an operand."""
    operators: str = "+"
    """Which operations: any of ``+`` and ``-`` (the larger operand comes first)."""
    difficulty: Literal["any", "no_carry", "carry"] = "any"
    """Keep all problems, only those without a carry or borrow, or only those with at least one."""
    scratchpad_share: float = 0.5
    """Share of demonstrations with the calculation written out; the others guess the answer straight away."""
    seed: int = 0
    """Names the order of the training problems and the choice of the held-out ones."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.digits <= 9:
            raise ValueError(f"need 1 <= min_digits <= digits <= 9, got {self.min_digits} and {self.digits}.")
        if not self.operators or set(self.operators) - set("+-"):
            raise ValueError(f"operators must be made of '+' and '-', got {self.operators!r}.")
        if not 0.0 <= self.scratchpad_share <= 1.0:
            raise ValueError(f"scratchpad_share must lie in [0, 1], got {self.scratchpad_share}.")

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return self._distinct("train", row_key(self.seed, "train", step, attempt), count)

    def validation(self, count: int | None = None) -> list[Problem]:
        return self._distinct("val", row_key(self.seed, "val"), count)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        a, operator, b = _parse(prompt.question)
        work = "\n".join(scratchpad(a, operator, b)) + "\n" if rng.random() < self.scratchpad_share else ""
        return f"<think>{work}</think><answer>\\boxed{{{prompt.answer}}}</answer>"

    def _distinct(self, split: str, seed: int, count: int | None) -> list[Problem]:
        """``count`` different problems of a split; None asks for as many as there are, ``ALL`` at the most."""
        found: dict[int, Problem] = {}
        wanted = ALL if count is None else count
        for problem in self._stream(random.Random(seed), tries=1000 * wanted):
            prompt = _prompt(*problem)
            if (self._is_held_out(*problem) == (split == "val")) and prompt.id not in found:
                found[prompt.id] = prompt
                if len(found) == wanted:
                    break
        if len(found) == wanted or (found and count is None):
            return list(found.values())
        raise ValueError(
            f"only {len(found)} different {split} problems found where {count} were asked for: "
            f"use more digits than {self.digits}, another difficulty than {self.difficulty!r}, or a smaller batch."
        )

    def _stream(self, rng: random.Random, tries: int) -> Iterator[tuple[int, str, int]]:
        for _ in range(tries):
            operator = rng.choice(self.operators)
            a, b = (rng.randrange(10 ** rng.randint(self.min_digits, self.digits)) for _ in range(2))
            low = 10 ** (self.min_digits - 1) if self.min_digits > 1 else 0
            if min(a, b) < low:
                continue
            if operator == "-" and a < b:
                a, b = b, a
            carries = any(carry for *_, carry in _columns(a, operator, b))
            if self.difficulty == "any" or carries == (self.difficulty == "carry"):
                yield a, operator, b

    def _is_held_out(self, a: int, operator: str, b: int) -> bool:
        """Both orders of a sum are held out or neither, for who knows ``285+347`` has seen ``347+285``."""
        first, second = sorted((a, b))
        return row_key(self.seed, "split", first, operator, second) % HELD_OUT_SHARE == 0


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


def _prompt(a: int, operator: str, b: int) -> Problem:
    answer = a + b if operator == "+" else a - b
    identity = 2 * (a * 10**9 + b) + (operator == "-")
    return Problem(id=identity, question=f"{a}{operator}{b}=", answer=str(answer))


def _parse(question: str) -> tuple[int, str, int]:
    operator = "+" if "+" in question else "-"
    a, b = question.rstrip("=").split(operator)
    return int(a), operator, int(b)
