"""``ProcessReward``: a value for every step of a completion, by a rule."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_pl.rewards.base import Columns, Reward, Score, StepScores
from grpo_pl.rewards.completion_text import BOX, last_boxed


class ProcessReward(Reward):
    """Scores the steps of a completion; its outcome value is the mean of the step values.

    Process supervision in GRPO normalises the step values over all steps of a group; the advantage of a token is the
    sum of the normalised values of all steps that end at or after it (DeepSeekMath, arXiv 2402.03300, section 4.1.3).
    """

    reads_form = True

    @abstractmethod
    def steps(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[StepScores | None]:
        """The steps of each completion; ``None`` where it cannot be judged and is not to blame.

        A completion without any step has empty ``values`` and ``ends``.
        """

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        return [_mean(scored) for scored in self.steps(completions, answers, columns)]


def _mean(scored: StepScores | None) -> Score:
    if scored is None:
        return Score(None, "bad_gold", "steps cannot be judged")
    if not scored.values:
        return Score(0.0, "no_answer", "no steps", scored)
    value = math.fsum(scored.values) / len(scored.values)
    right = sum(v >= 1.0 for v in scored.values)
    return Score.of(value, f"{right} of {len(scored.values)} steps", steps=scored)


def line_steps(text: str, start: int = 0, end: int | None = None) -> list[tuple[str, int]]:
    """(stripped line, offset in ``text`` just after its last character that is no space) of every non-blank line of
    ``text[start:end]``."""
    found = []
    position = start
    for line in text[start:end].splitlines(keepends=True):
        if line.strip():
            found.append((line.strip(), position + len(line.rstrip())))
        position += len(line)
    return found


_PROBLEM = re.compile(r"(?<!\d)(\d{1,100})\s*([+-])\s*(\d{1,100})(?!\d)")


def column_steps(a: int, operator: str, b: int) -> list[str]:
    """The correct lines of column addition, or of column subtraction with a ≥ b, units first.

    A line is ``x+y+c=s`` with the digits x and y of the column, the carry c into it and their full sum s, or
    ``x-y-c=d`` with the borrow c and the resulting digit d.
    """
    lines, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        result = x + y + carry if operator == "+" else (x - y - carry) % 10
        lines.append(f"{x}{operator}{y}{operator}{carry}={result}")
        carry = int(x + y + carry >= 10) if operator == "+" else int(x - y - carry < 0)
    return lines


@dataclass(kw_only=True)
class ColumnArithmeticReward(ProcessReward):
    r"""Checks written-out column addition and subtraction line by line; each step is worth 0 or 1.

    The steps are the lines before ``</think>`` (of the whole text if there is none) and the last ``\boxed{…}``. The
    k-th line is worth 1 if it is the k-th column of the problem, as ``7+5+0=12`` or ``3-5-1=7``; the box is worth 1 if
    it holds the gold answer. As an outcome reward it is the share of right steps; range [0, 1].

    The problem, such as ``347+285``, is the last one in the ``question`` column, else in ``prompt``. A prompt without a
    problem, a difference below zero, or numbers of more than 100 digits cannot be judged.
    """

    trusted = True
    name: str = "columns"

    def steps(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[StepScores | None]:
        prompts = columns["question"] if "question" in columns else columns["prompt"]
        return [self._one(*row) for row in zip(completions, answers, prompts, strict=True)]

    @staticmethod
    def _one(completion: str, gold: str, prompt: str) -> StepScores | None:
        problems = _PROBLEM.findall(str(prompt))
        if not problems:
            return None
        a, operator, b = int(problems[-1][0]), problems[-1][1], int(problems[-1][2])
        if operator == "-" and a < b:
            return None
        right = column_steps(a, operator, b)
        boxed = last_boxed(completion)
        box_start, box_open = max((match.span() for match in BOX.finditer(completion)), default=(-1, -1))
        think_end = completion.find("</think>")
        work_end = think_end if think_end >= 0 else box_start if boxed is not None else len(completion)
        work_start = completion.find("<think>") + len("<think>") if "<think>" in completion[:work_end] else 0
        found = line_steps(completion, work_start, work_end)
        values = [float(k < len(right) and line == right[k]) for k, (line, _) in enumerate(found)]
        ends = [end for _, end in found]
        if boxed is not None and box_start >= work_end:
            values.append(float(boxed.strip() == gold.strip()))
            ends.append(box_open + len(boxed) + 1)
        return StepScores(tuple(values), tuple(ends))
