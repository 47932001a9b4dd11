"""Games of GuessTheNumber, with demonstrations of which some halve the range that is left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.environments.base import Player, Transition, text_of
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class GuessNumberPrompts(GeneratedPrompts):
    """Games that differ by their seed alone, which the pipeline derives from the problem's id: nothing is asked.

    For ``TextArenaEnvironment(id="GuessTheNumber-v0")`` with ``grpo_pl.environments.guess_number:show``.
    """

    most: int = 15
    """Largest number, ``max_number`` of the game; the smallest is 1."""
    halving_share: float = 0.2
    """Share of demonstrations that guess the middle of where the number can still be; the others guess blindly."""

    def __post_init__(self) -> None:
        if self.most < 2:
            raise ValueError(f"most must be at least 2, got {self.most}.")
        if not 0.0 <= self.halving_share <= 1.0:
            raise ValueError(f"halving_share must lie in [0, 1], got {self.halving_share}.")

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> Player:
        halving, guesses = rng.random() < self.halving_share, list[int]()

        def guess(turns: Sequence[Transition]) -> str | None:
            """No number twice, which the game forbids."""
            if halving:
                low, high = map(int, text_of(turns[-1].observation).split("-"))
                left = [(low + high + rng.randrange(2)) // 2]
            else:
                left = [number for number in range(1, self.most + 1) if number not in guesses]
            guesses.extend(rng.sample(left, min(1, len(left))))
            return f"[{guesses[-1]}]" if left else None

        return guess

    def draw(self, rng: random.Random) -> Problem:
        return Problem(id=rng.getrandbits(48), question="", answer="")

    def how_to_get_more(self) -> str:
        return "ask for fewer."
