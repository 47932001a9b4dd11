"""``GeneratedPrompts``: problems made up without end; a hash decides which are held out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from grpo_pl.data.sources import PromptSource, is_of_part
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

HELD_OUT_SHARE = 10
"""One problem in this many is held out."""
ALL = 200
"""Held-out problems that are made where no number is asked for; fewer where there are not so many."""


@dataclass(kw_only=True)
class GeneratedPrompts(PromptSource):
    """Base of sources that make problems up: splits cannot overlap, and no problem is twice in a batch."""

    seed: int = 0
    """Names the order of the training problems and the choice of the held-out ones."""
    demonstrated_share: float = 1.0
    """Share of the training problems, by a hash, that a cold start shows; below 1 the rollouts ask the others alone, so
    that none is answered from memory."""

    MORE: ClassVar[str] = "ask for fewer."
    """Advice for a user whose settings give too few problems; names in braces are fields."""

    def candidates(self, split: Literal["train", "val"], *place: int, count: int) -> Iterator[Problem]:
        """Random problems of both splits, enough to find ``count`` of one among them; perhaps some more than once.

        Args:
            place: the step and attempt of training problems, none for held-out ones; with ``split`` it names the draws.
        """
        rng = random.Random(row_key(self.seed, split, *place))
        drawn = (self.draw(rng) for _ in range(1000 * count))
        return (problem for problem in drawn if problem is not None)

    def draw(self, rng: random.Random) -> Problem | None:
        """A random problem, or None for a draw that makes none; not needed by a source with its own `candidates`."""
        raise NotImplementedError

    def identity(self, problem: Problem) -> tuple[int | str, ...]:
        """The key by which a problem is held out or not; equal for problems of which one gives the other away."""
        return (problem.id,)

    def how_to_get_more(self) -> str:
        """``MORE`` with the settings in it."""
        return self.MORE.format(**vars(self))

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return self._distinct("train", step, attempt, count=count, least=count)

    def validation(self, count: int | None = None) -> list[Problem]:
        return self._distinct("val", count=ALL if count is None else count, least=1 if count is None else count)

    def _distinct(self, split: Literal["train", "val"], *place: int, count: int, least: int) -> list[Problem]:
        found: dict[int, Problem] = {}
        for problem in self.candidates(split, *place, count=count):
            wanted = self.is_held_out(problem) == (split == "val")
            if split == "train":
                wanted &= is_of_part(self.demonstrated_share, place[0], self.seed, *self.identity(problem))
            if wanted:
                found.setdefault(problem.id, problem)
            if len(found) == count:
                break
        if len(found) < least:
            raise ValueError(
                f"only {len(found)} different {split} problems found where {least} were asked for: "
                f"{self.how_to_get_more()}"
            )
        return list(found.values())

    def is_held_out(self, problem: Problem) -> bool:
        """True if a problem belongs to the held-out ones."""
        return row_key(self.seed, "split", *self.identity(problem)) % HELD_OUT_SHARE == 0
