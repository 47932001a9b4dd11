"""``ReasoningGymPrompts``: any of reasoning-gym's procedural tasks, with difficulty settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from grpo_pl.data.cells import normal_question
from grpo_pl.data.tasks.generated import HELD_OUT_SHARE, GeneratedPrompts
from grpo_pl.functional.sampling import row_key
from grpo_pl.rewards.sandbox.gym_entry import GymProblem, check_task, pack, unpack
from grpo_pl.types import Problem

COLUMN = "reasoning_gym"
"""Column in which the reward finds task, settings and entry, as JSON text."""


@dataclass(kw_only=True)
class ReasoningGymPrompts(GeneratedPrompts):
    """Problems of one task of reasoning-gym (Stojanovski et al. 2025), made up without end.

    Reward: ``grpo_pl.rewards.ReasoningGymReward``. Needs ``pip install 'grpo_pl[reasoning-gym]'``.
    """

    task: str
    """Name of the task: ``chain_sum``, ``countdown``, ``gsm_symbolic`` …"""
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's own settings, such as ``{min_terms: 2, max_terms: 3}``."""

    MORE: ClassVar[str] = "widen data.source.settings ({settings}) of {task!r} or ask for fewer."

    def __post_init__(self) -> None:
        self._entries(0, 1)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        answer = unpack(prompt.columns[COLUMN]).entry["answer"]
        return None if answer is None else f"<think></think><answer>\\boxed{{{answer}}}</answer>"

    def candidates(self, split: Literal["train", "val"], *place: int, count: int) -> Iterator[Problem]:
        part = "/".join(map(str, place))
        for batch in range(100):
            start = row_key(self.seed, self.task, split, part, batch) % 2**31
            for entry in self._entries(start, (HELD_OUT_SHARE if split == "val" else 2) * count):
                if entry["answer"] != "":  # such as 0 in some bases; None is a task that names no answer
                    yield self._problem(entry)

    def identity(self, problem: Problem) -> tuple[str]:
        """Questions that differ in case or spaces alone are one problem, as for the check of overlaps."""
        return (normal_question(problem.question),)

    def _entries(self, start: int, size: int) -> Iterator[dict[str, Any]]:
        check_task(self.task, self.settings)
        import reasoning_gym  # type: ignore[import-untyped]

        try:
            return iter(reasoning_gym.create_dataset(self.task, size=size, seed=start, **self.settings))
        except (AssertionError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"reasoning-gym refuses the settings {self.settings} of {self.task!r}: {error}") from error

    def _problem(self, entry: dict[str, Any]) -> Problem:
        return Problem(
            id=row_key(self.task, entry["question"]),
            question=entry["question"],
            answer=entry["answer"] or "",  # some tasks have many right answers and name none
            columns={COLUMN: pack(GymProblem(self.task, self.settings, entry))},
        )
