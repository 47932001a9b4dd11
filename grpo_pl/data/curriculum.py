"""``CurriculumPrompts``: prefers problems that the policy solves about half of the time, and skips solved ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from grpo_pl.data.sources import PromptSource
from grpo_pl.environment import Player
from grpo_pl.functional.argument_checks import check_at_least, check_within
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

FLOOR = 0.02
"""Weight of a problem that is never or always solved, beside 0.25 for one that is solved half of the time."""


@dataclass(kw_only=True)
class CurriculumPrompts(PromptSource):
    """Chooses among the candidates of another source by how often each was solved lately.

    A group of equal rewards teaches nothing, and the variance p(1 − p) of a right answer is largest at p = ½; so a
    candidate is drawn with a weight of p(1 − p) + 0.02, where p is its running pass rate, or ½ before its first visit
    (Kimi k1.5, arXiv:2501.12599, section 2.3.4, samples by 1 − p). Solved problems are passed over while there are
    others. What is drawn depends on the step and on the statistics, which checkpoints hold, and on nothing else.
    """

    source: PromptSource
    """Source of the candidates; it should repeat its problems, or there is nothing to learn about them."""
    pool: int = 4
    """Candidates for each prompt of a step, as far as the source has so many: its prompts of as many attempts."""
    memory: float = 0.5
    """Share of the running pass rate that a new visit keeps: p ← memory · p + (1 − memory) · observed."""
    solved_at: float = 0.95
    """Running pass rate from which a problem counts as solved …"""
    solved_after: int = 2
    """… if it was visited at least this often."""
    seed: int = 0
    """Names the draws."""

    _visits: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _rates: dict[int, float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_at_least(1, "curriculum", pool=self.pool, solved_after=self.solved_after)
        check_within("[0, 1)", "curriculum", memory=self.memory)
        check_within("(0, 1]", "curriculum", solved_at=self.solved_at)

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        first = self.source.prompts(step, attempt * self.pool, count=count)
        if step < 0:  # the cold start's, which must not depend on statistics
            return first
        candidates = {p.id: p for p in first}
        for further in range(attempt * self.pool + 1, (attempt + 1) * self.pool):
            others = {p.id: p for p in self.source.prompts(step, further, count=count)}
            if others.keys() <= candidates.keys():
                break  # the source has no more
            candidates |= others
        best = sorted(candidates.values(), key=lambda p: (self.is_solved(p.id), -self._draw(p.id, step, attempt)))
        return best[:count]

    def validation(self, count: int | None = None) -> list[Problem]:
        return self.source.validation(count)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        return self.source.demonstration(prompt, rng)

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> Sequence[str] | Player | None:
        return self.source.demonstrated_actions(prompt, rng)

    def problems(self, split: Literal["train", "val"]) -> Sequence[Problem] | None:
        return self.source.problems(split)

    def leaves(self) -> dict[str, PromptSource]:
        return self.source.leaves()

    # --- statistics -------------------------------------------------------------------------------------------------

    def observe(self, rates: Mapping[int, float]) -> None:
        for identity, rate in rates.items():
            visits = self._visits.get(identity, 0)
            old = self._rates.get(identity, rate)
            self._visits[identity] = visits + 1
            self._rates[identity] = self.memory * old + (1.0 - self.memory) * rate

    def is_solved(self, identity: int) -> bool:
        """True if a problem was right often enough to be passed over."""
        often = self._visits.get(identity, 0) >= self.solved_after
        return often and self._rates[identity] >= self.solved_at

    def state_dict(self) -> dict[str, Any]:
        """Three tensors, as long as there are visited problems."""
        ids = list(self._visits)
        return {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "visits": torch.tensor([self._visits[i] for i in ids], dtype=torch.int64),
            "rates": torch.tensor([self._rates[i] for i in ids], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:  # of a run that had no curriculum so far
            return
        ids = state["ids"].tolist()
        self._visits = dict(zip(ids, state["visits"].tolist(), strict=True))
        self._rates = dict(zip(ids, state["rates"].tolist(), strict=True))

    def _draw(self, identity: int, step: int, attempt: int) -> float:
        """u^(1/w): taking the largest draws without replacement by weight (Efraimidis and Spirakis 2006)."""
        rate = self._rates.get(identity, 0.5)
        uniform = random.Random(row_key(self.seed, "curriculum", step, attempt, identity)).random()
        return float(uniform ** (1.0 / (rate * (1.0 - rate) + FLOOR)))
