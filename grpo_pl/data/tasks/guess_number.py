"""Games of GuessTheNumber, with demonstrations of which some halve the range that is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.environment import Player, Transition, text_of
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class GuessNumberPrompts(GeneratedPrompts):
    """Games that differ by their seed alone, which the pipeline derives from the problem's id: nothing is asked.

    For ``TextArenaEnvironment(id="GuessTheNumber-v0")`` with ``grpo_pl.extras.agents.guess_number:show``.
    """

    halving_share: float = 0.2
    """Share of demonstrations that guess the middle of where the number can still be; the others count up from 1."""

    def __post_init__(self) -> None:
        check_within("[0, 1]", "data.source", halving_share=self.halving_share)

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> Player:
        halving = rng.random() < self.halving_share

        def guess(turns: Sequence[Transition]) -> str:
            low, high = map(int, text_of(turns[-1].observation).split("-"))
            return f"[{(low + high + rng.randrange(2)) // 2 if halving else low}]"

        return guess

    def draw(self, rng: random.Random) -> Problem:
        return Problem(id=rng.getrandbits(48), question="", answer="")
