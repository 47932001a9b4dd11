"""``ReasoningGymPrompts``: any of reasoning-gym's procedural tasks, with difficulty settings."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.rewards.sandbox.gym_entry import GymProblem, check_task, pack, unpack
from grpo_pl.types import Problem

HELD_OUT_SHARE = 10
"""One problem in this many is held out, by a hash of the question itself."""
COLUMN = "reasoning_gym"
"""Column in which the reward finds task, settings and entry, as JSON text."""


@dataclass(kw_only=True)
class ReasoningGymPrompts(PromptSource):
    """Problems of one task of reasoning-gym (Stojanovski et al. 2025), made up without end.

    A problem is held out or not by the hash of its question, so the splits cannot overlap. Reward:
    ``grpo_pl.rewards.ReasoningGymReward``. Needs ``pip install 'grpo_pl[reasoning-gym]'``.
    """

    task: str
    """Name of the task: ``chain_sum``, ``countdown``, ``gsm_symbolic`` …"""
    settings: dict[str, Any] = field(default_factory=dict)
    """The task's own settings, such as ``{min_terms: 2, max_terms: 3}``."""
    worked_share: float = 0.5
    """Share of demonstrations with the work written out, where there is any to show (``chain_sum``,
    ``gsm_symbolic``); the others give the answer straight away."""
    seed: int = 0
    """Names the problems."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.worked_share <= 1.0:
            raise ValueError(f"worked_share must lie in [0, 1], got {self.worked_share}.")
        self._entries(0, 1)

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return self._distinct("train", f"{step}/{attempt}", count)

    def validation(self, count: int | None = None) -> list[Problem]:
        return self._distinct("val", "", 200 if count is None else count)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        entry = unpack(prompt.columns[COLUMN]).entry
        if entry["answer"] is None:
            return None
        work = _worked(self.task, entry) if rng.random() < self.worked_share else ""
        return f"<think>{work}</think><answer>\\boxed{{{entry['answer']}}}</answer>"

    def _distinct(self, split: str, part: str, count: int) -> list[Problem]:
        found: dict[int, Problem] = {}
        for batch in range(100):
            start = row_key(self.seed, self.task, split, part, batch) % 2**31
            for entry in self._entries(start, (HELD_OUT_SHARE if split == "val" else 2) * count):
                prompt = self._prompt(entry)
                if prompt.id not in found and self._is_held_out(prompt.id) == (split == "val"):
                    found[prompt.id] = prompt
                    if len(found) == count:
                        return list(found.values())
        raise ValueError(
            f"only {len(found)} different {split} problems of {self.task!r} found where {count} were asked for: "
            f"widen data.source.settings ({self.settings}) or ask for fewer."
        )

    def _entries(self, start: int, size: int) -> Iterator[dict[str, Any]]:
        check_task(self.task, self.settings)
        import reasoning_gym  # type: ignore[import-untyped]

        try:
            return iter(reasoning_gym.create_dataset(self.task, size=size, seed=start, **self.settings))
        except (AssertionError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"reasoning-gym refuses the settings {self.settings} of {self.task!r}: {error}") from error

    def _prompt(self, entry: dict[str, Any]) -> Problem:
        return Problem(
            id=row_key(self.task, entry["question"]),
            question=entry["question"],
            answer=entry["answer"] or "",  # some tasks have many right answers and name none
            columns={COLUMN: pack(GymProblem(self.task, self.settings, entry))},
        )

    def _is_held_out(self, problem_id: int) -> bool:
        return row_key(self.seed, "split", problem_id) % HELD_OUT_SHARE == 0


def _worked(task: str, entry: dict[str, Any]) -> str:
    """The work behind an answer, where the entry tells it."""
    metadata = entry["metadata"]
    if task == "chain_sum":
        return "".join(f"{line}\n" for line in running_totals(metadata["expression"]))
    if "answer_cot" in metadata:
        return str(metadata["answer_cot"]).rsplit("####", 1)[0]
    return ""


def running_totals(expression: str) -> list[str]:
    """One line a term after the first: ``4 + 3 - 9`` to ``4+3=7``, ``7-9=-2``."""
    first, *rest = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    total, lines = int(first), []
    for term in rest:
        lines.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return lines
