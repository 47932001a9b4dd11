"""A tiny task of several turns: count down from a number; the first to reach 0 exactly has earned the most."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from user_environments import Countdown

from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.agents import Observation
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class Down(Countdown):
    """``n`` takes n away and earns n/10; what is no digit means nothing. Below 0 the episode is lost."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        self.left = row["start"]
        return f"{self.left}:", {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        if action == "!":
            raise RuntimeError("this environment is broken")
        if not (action.isascii() and action.isdigit() and len(action) == 1):
            return f"{self.left}?", 0.0, False, False, {"invalid_action": True, "state": f"{self.left}:"}
        self.left -= int(action)
        if self.left < 0:
            return "lost", -0.5, True, False, {}
        return f"{self.left}:", int(action) / 10, self.left == 0, False, {}


@dataclass(kw_only=True)
class DownPrompts(PromptSource):
    """Numbers from 2 to 9; demonstrations take 1, 2 or 3 away, or stammer."""

    seed: int = 0

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        rng = random.Random(row_key(self.seed, "down", step, attempt))
        return [self._problem(rng, 2 * rng.getrandbits(40)) for _ in range(count)]

    def validation(self, count: int | None = None) -> list[Problem]:
        rng = random.Random(row_key(self.seed, "down", "val"))
        return [self._problem(rng, 2 * rng.getrandbits(40) + 1) for _ in range(8 if count is None else count)]

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> list[str]:
        return [rng.choice(["1", "2", "3", "x"]) for _ in range(12)]

    @staticmethod
    def _problem(rng: random.Random, identity: int) -> Problem:
        return Problem(id=identity, question="", answer="", columns={"start": rng.randint(2, 9)})
