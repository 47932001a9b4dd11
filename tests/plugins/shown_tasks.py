"""Tasks of an environment, with demonstrations that call its calculator."""

import random
from dataclasses import dataclass

from grpo_pl.extras.agents.environment_tasks import EnvironmentPrompts
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class ShownPrompts(EnvironmentPrompts):
    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> list[str]:
        return [f"<calc>{prompt.question.rstrip('=')}</calc>", prompt.answer]
