"""``ReasoningGymReward``: reasoning-gym's own scorer of each task, in killable worker processes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.rewards.base import MissingColumn, Reward, Score
from grpo_pl.rewards.format import answer_block
from grpo_pl.rewards.mathematics import answer_text as text
from grpo_pl.rewards.sandbox.gym_entry import unpack
from grpo_pl.rewards.sandbox.pool import SandboxSettings, Verdict, WorkerPool, shared_pool

COLUMN = "reasoning_gym"
"""Column in which ``ReasoningGymPrompts`` hands over the task, its settings and the entry, as JSON text."""
_TEXT = re.compile(r"\s*\\text\s*\{(?P<words>[^{}]*)\}\s*")


@dataclass(kw_only=True)
class ReasoningGymReward(Reward):
    r"""What reasoning-gym's scorer gives the answer; range [0, 1], 1 for a right one.

    The answer is the last ``\boxed{…}``, else the last ``<answer>``. Some scorers give part of the value for an answer
    that is not right; ``partial: false`` makes those 0, ``true`` keeps what exceeds the best of a panel of constants.
    Answers that a scorer pays in full and no person would accept (``gym_guards``) are ``wrong``. Several scorers
    evaluate the answer as code, so they run in processes under limits of time and memory that can read literals and
    arithmetic only and do nothing else.
    Needs ``pip install 'grpo_pl[reasoning-gym]'``.
    """

    name: str = "reasoning_gym"
    """Key of this reward in metrics, tables and files."""
    correctness: bool = True
    """True for the one reward per config that says whether an answer is right."""
    partial: bool = True
    """Keep what the scorer gives for answers that are not right."""
    workers: int = 2
    """Worker processes; rewards with the same limits share them."""
    soft_limit_s: float = 2.0
    """CPU seconds after which a scorer is interrupted (status ``timeout``)."""
    hard_limit_s: float = 5.0
    """CPU seconds after which a worker that cannot be interrupted is killed (status ``killed``)."""
    memory_limit_mb: int = 2048
    """Address space of one worker in MiB."""
    max_answer_chars: int = 5000
    """Longer answers are not scored (status ``too_long``)."""

    pool: WorkerPool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars must be at least 1, got {self.max_answer_chars}.")
        settings = SandboxSettings(
            workers=self.workers,
            soft_limit_s=self.soft_limit_s,
            hard_limit_s=self.hard_limit_s,
            memory_limit_mb=self.memory_limit_mb,
            judge="gym_judge.py",
        )
        self.pool = shared_pool(settings)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        if COLUMN not in columns:
            raise MissingColumn(
                f"reward {self.name!r} scores problems of grpo_pl.data.tasks.reasoning_gym.ReasoningGymPrompts only; "
                f"there is no column {COLUMN!r}. In a mixture, give each source its own by grpo_pl.rewards.PerSource."
            )
        self._check(columns[COLUMN])
        scores: dict[int, Score] = {}
        jobs: list[tuple[str, str]] = []
        for row, (completion, entry) in enumerate(zip(completions, columns[COLUMN], strict=True)):
            found = self._ready(_stated(completion), entry)
            if isinstance(found, Score):
                scores[row] = found
            else:
                jobs.append(found)
        verdicts = iter(self.pool.run(jobs))
        return [scores[row] if row in scores else self._score(next(verdicts)) for row in range(len(completions))]

    def start(self) -> None:
        self.pool.start()

    def _check(self, cells: Sequence[Any]) -> None:
        """Refuses cells that no source of ours wrote, before any worker sees them; None is a row without a problem."""
        seen = set[str]()
        for cell in cells:
            if cell is None or (isinstance(cell, str) and cell in seen):
                continue
            try:
                unpack(cell)
            except ValueError as error:
                raise MissingColumn(
                    f"reward {self.name!r}: the column {COLUMN!r} holds no problem that ReasoningGymPrompts wrote: "
                    f"{str(error).rstrip('.')}."
                ) from error
            seen.add(cell)

    def close(self) -> None:
        """Ends the workers, for all rewards that share them."""
        self.pool.close()

    def _ready(self, answer: str, entry: Any) -> Score | tuple[str, str]:
        """The score where no scorer is needed, else the job for the pool."""
        if not answer:
            return Score(0.0, "no_answer")
        if len(answer) > self.max_answer_chars:
            return Score(0.0, "too_long", f"{len(answer)} characters")
        return Score(None, "bad_gold", f"no column {COLUMN!r}") if entry is None else (entry, answer)

    def _score(self, verdict: Verdict) -> Score:
        if verdict.status not in ("ok", "wrong"):
            blameless = verdict.status in ("unavailable", "bad_gold")
            return Score(None if blameless else 0.0, verdict.status, verdict.detail)
        try:
            value = float(verdict.detail)
        except ValueError:  # the scorer raised an exception on the answer
            return Score(0.0, "wrong", verdict.detail)
        return Score(value if self.partial or value >= 1.0 else 0.0, verdict.status)


def _stated(completion: str) -> str:
    found = text.last_boxed(completion) or answer_block(completion) or ""
    words = _TEXT.fullmatch(found)
    return (words["words"] if words else found).strip()
