"""``ReasoningGymReward``: scores answers with reasoning-gym's own scorer of the task, in worker processes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_pl.rewards.base import Columns, MissingColumn, Score, not_judged
from grpo_pl.rewards.completion_text import boxed_or_block
from grpo_pl.rewards.sandbox.gym_entry import unpack
from grpo_pl.rewards.sandbox.pool import SandboxedReward, Verdict

COLUMN = "reasoning_gym"
"""Column in which ``ReasoningGymPrompts`` passes the task, its settings and the entry, as JSON text."""
_TEXT = re.compile(r"\A\s*\\text\s*\{([^{}]*)\}\s*\Z")


@dataclass(kw_only=True)
class ReasoningGymReward(SandboxedReward):
    r"""The score of the answer by reasoning-gym's scorer; range [0, 1], 1 for a right answer.

    The answer is, of the text after the thoughts, the content of the last ``\boxed{…}``, else of the last ``<answer>``.
    Some scorers give partial credit for an answer that is not right: ``partial: false`` makes it 0, ``true`` keeps it
    where it exceeds what the best of a panel of constant answers earns. Answers that a scorer accepts although they are
    wrong (``gym_guards``) are ``wrong``. Several scorers evaluate the answer as code, so scorers run in worker
    processes with limits on time and memory, in which only literals and arithmetic are evaluated. Needs ``pip install
    'grpo_pl[reasoning-gym]'``.
    """

    judge: ClassVar[str] = "grpo_pl.rewards.sandbox.gym_judge"
    trusted = True
    name: str = "reasoning_gym"
    correctness: bool = True
    partial: bool = True
    """Keep the scorer's partial credit for answers that are not right."""
    soft_limit_s: float = 2.0
    hard_limit_s: float = 5.0
    max_answer_chars: int = 5000

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        if COLUMN not in columns:
            raise MissingColumn(
                f"reward {self.name!r} scores problems of grpo_pl.data.tasks.reasoning_gym.ReasoningGymPrompts only; "
                f"there is no column {COLUMN!r}. In a mixture, give each source its own by grpo_pl.rewards.PerSource."
            )
        try:
            for cell in columns[COLUMN]:  # before a worker gets one
                if cell is not None:  # a row without a problem, which is `bad_gold`
                    unpack(cell)
        except ValueError as error:
            raise MissingColumn(
                f"reward {self.name!r}: the column {COLUMN!r} holds no problem that ReasoningGymPrompts wrote: "
                f"{str(error).rstrip('.')}."
            ) from error
        rows = zip(completions, columns[COLUMN], strict=True)
        found = [self._ready(_TEXT.sub(r"\1", boxed_or_block(text)).strip(), entry) for text, entry in rows]
        verdicts = iter(self.pool.run([job for job in found if not isinstance(job, Score)]))
        return [ready if isinstance(ready, Score) else self._score(next(verdicts)) for ready in found]

    def _ready(self, answer: str, entry: Any) -> Score | tuple[str, str]:
        """The score where no scorer is needed, else the job for the pool."""
        if score := not_judged(answer, self.max_answer_chars):
            return score
        return Score(None, "bad_gold", f"no column {COLUMN!r}") if entry is None else (entry, answer)

    def _score(self, verdict: Verdict) -> Score:
        if verdict.status not in ("ok", "wrong"):
            blameless = verdict.status in ("unavailable", "bad_gold")
            return Score(None if blameless else 0.0, verdict.status, verdict.detail)
        try:
            value = float(verdict.detail)
        except ValueError:  # the scorer raised an exception on the answer
            value = math.nan
        if not math.isfinite(value):
            return Score(0.0, "wrong", verdict.detail)
        return Score(value if self.partial or value >= 1.0 else 0.0, verdict.status)
