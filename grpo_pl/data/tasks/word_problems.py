"""``WordProblems``: short stories with one or two steps of arithmetic, for a policy that reads English already."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.data.tasks.wordings import (
    HELD_OUT,
    HELD_OUT_ITEMS,
    HELD_OUT_PEOPLE,
    ONE_STEP,
    TRAINING_ITEMS,
    TRAINING_PEOPLE,
    TWO_STEPS,
    Wording,
)
from grpo_pl.functional.argument_checks import check_choice, check_within
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

PRONOUNS = {
    "she": {"they": "she", "They": "She", "them": "her", "their": "her"},
    "he": {"they": "he", "They": "He", "them": "him", "their": "his"},
}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
HeldOut = Literal["numbers", "wordings", "two_step"]
WORDINGS = {"numbers": ONE_STEP, "wordings": HELD_OUT, "two_step": TWO_STEPS}
"""Wordings of the held-out problems."""
DEFAULT_HELD_OUT = 400
"""Held-out problems where no number is asked for."""
HELD_OUT_PAIRS = 5
"""One pair of numbers in this many is held out."""

TRIES = 20_000
"""Draws of the numbers of a problem."""

Step = tuple[int, str, int]
"""Number, operation, number."""


@dataclass(kw_only=True)
class WordProblems(GeneratedPrompts):
    """Problems such as ``Tom has 14 apples and gets 5 more. How many apples does Tom have now?``

    All results are whole and at least 2. Wordings are in ``grpo_pl/data/tasks/wordings.py``. A step is held out by its
    two numbers: where 7 and 8 are a held-out pair, no step of any training problem is 7 + 8, 8 · 7 or 8 − 7, and every
    step of every held-out problem has such a pair. Columns: ``steps``, the work (``14 + 5 = 19``, two steps separated
    by ``; ``), and ``wording``, its verb.
    """

    held_out: HeldOut = "numbers"
    """Kind of held-out problems, all with numbers that training never uses: one step in the wordings of
    training, one step in other wordings with other names and things, or two steps in the wordings of training."""
    two_step_share: float = 0.25
    """Share of the training problems with two steps."""
    largest: int = 20
    """Largest sum, and largest number to subtract from."""
    table: int = 9
    """Largest factor, divisor and quotient."""
    operations: str = "+-*/"
    """Operations of the wordings: all steps of a wording are among these."""
    boxed: bool = False
    r"""Demonstrations end in ``The answer is \boxed{40}.``, else in ``The answer is 40.``"""

    MORE: ClassVar[str] = "raise largest ({largest}) or table ({table}), or ask for fewer."

    def __post_init__(self) -> None:
        check_choice("held_out", self.held_out, HeldOut)
        check_within("[0, 1]", "data.source", two_step_share=self.two_step_share)
        lacking = [kind for kind, wordings in WORDINGS.items() if not self._wordings(wordings)]
        if lacking or not set(self.operations) <= OPERATIONS.keys():
            raise ValueError(f"operations must be some of + - * /, + or - among them, got {self.operations!r}.")
        check_within("[10, 1000]", "data.source", largest=self.largest)
        check_within("[5, 30]", "data.source", table=self.table)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        answer = rf"\boxed{{{prompt.answer}}}" if self.boxed else prompt.answer
        return f"{prompt.columns['steps'].replace('; ', '. ')}. The answer is {answer}."

    def validation(self, count: int | None = None) -> list[Problem]:
        return super().validation(DEFAULT_HELD_OUT if count is None else count)

    def candidates(self, split: Literal["train", "val"], *place: int, count: int) -> Iterator[Problem]:
        held_out = split == "val"
        rng = random.Random(row_key(self.seed, split, *([self.held_out] if held_out else place)))
        for _ in range(1000 * count):
            if held_out:
                wordings = WORDINGS[self.held_out]
            else:
                wordings = TWO_STEPS if rng.random() < self.two_step_share else ONE_STEP
            wording = rng.choice(self._wordings(wordings))
            # numbers for this wording: a new wording each time would make those of one step common
            for _ in range(TRIES):
                steps = self._steps(wording.steps, rng)
                if steps is not None and all(self._is_held_out(step) == held_out for step in steps):
                    yield _told(wording, steps, rng)
                    break
            else:
                raise ValueError(f"no numbers found for the wording {wording.verb!r}: {self.how_to_get_more()}")

    def is_held_out(self, problem: Problem) -> bool:
        return all(self._is_held_out(step) for step in _read(problem.columns["steps"]))

    def _wordings(self, wordings: Sequence[Wording]) -> list[Wording]:
        return [wording for wording in wordings if set(wording.steps) <= set(self.operations)]

    def _is_held_out(self, step: Step) -> bool:
        a, _, b = step
        return row_key(self.seed, "pair", min(a, b), max(a, b)) % HELD_OUT_PAIRS == 0

    def _steps(self, operations: str, rng: random.Random) -> list[Step] | None:
        """Numbers for these operations, or None for a draw of which something is too large or not whole."""
        steps: list[Step] = []
        for sign in operations:
            a, b = self._numbers(sign, rng)
            if steps:
                a = _result(steps[-1])
            if not self._fits(a, sign, b):
                return None
            steps.append((a, sign, b))
        return steps

    def _numbers(self, sign: str, rng: random.Random) -> tuple[int, int]:
        """A first and a second number; ``_fits`` says whether they go together."""
        if sign in "+-":
            return rng.randint(2, self.largest), rng.randint(2, self.largest)
        a, b = rng.randint(2, self.table), rng.randint(2, self.table)
        return (a if sign == "*" else a * b), b

    def _fits(self, a: int, sign: str, b: int) -> bool:
        if sign == "+":
            return a + b <= self.largest
        if sign == "-":
            return a <= self.largest and a - b >= 2
        if sign == "*":
            return a <= self.table
        return a % b == 0 and 2 <= a // b <= self.table


def _result(step: Step) -> int:
    a, sign, b = step
    return OPERATIONS[sign](a, b)


def _told(wording: Wording, steps: Sequence[Step], rng: random.Random) -> Problem:
    """The problem of a wording with these numbers, with names and things drawn."""
    seen = wording not in HELD_OUT
    people, things = (TRAINING_PEOPLE, TRAINING_ITEMS) if seen else (HELD_OUT_PEOPLE, HELD_OUT_ITEMS)
    kind = rng.choice(sorted(people))
    name = rng.choice(people[kind])
    other = rng.choice([one for names in people.values() for one in names if one != name])
    numbers = dict(zip("abc", [steps[0][0], *(b for *_, b in steps)], strict=False))
    items = rng.choice(wording.items or things)
    question = wording.text.format(name=name, other=other, items=items, **PRONOUNS[kind], **numbers)
    results = [_result(step) for step in steps]
    work = "; ".join(f"{a} {sign} {b} = {result}" for (a, sign, b), result in zip(steps, results, strict=True))
    return Problem(
        id=row_key("word problem", question),
        question=question,
        answer=str(results[-1]),
        columns={"steps": work, "wording": wording.verb},
    )


def _read(work: str) -> list[Step]:
    """The steps of the column ``steps``."""
    parts = [line.split() for line in work.split("; ")]
    return [(int(a), sign, int(b)) for a, sign, b, *_ in parts]
