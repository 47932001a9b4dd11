"""``MixturePrompts``: mixes several sources by weight; each problem bears the name of its source."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from grpo_pl.data.sources import Problems, PromptSource
from grpo_pl.environment import Player
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

PART_ID = "part_id"
"""Column that keeps a problem's id inside its part."""


@dataclass(kw_only=True)
class MixturePrompts(PromptSource):
    """Every step holds the same number of prompts of each part: its weight's share, rounded to whole prompts.

    So each part keeps its own order and its own epochs, and each step's mix is the same. Rewards find the part's name
    in the column ``source`` (see ``grpo_pl.rewards.PerSource``), and every metric is also reported per part.
    """

    parts: dict[str, PromptSource] = field(default_factory=dict)
    """Name -> source."""
    weights: dict[str, float] = field(default_factory=dict)
    """Name -> relative weight in a step; parts that are not named weigh 1."""
    seed: int = 0
    """Names the order of prompts inside a step."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a mixture needs `parts`: a name and a source for each.")
        unknown = sorted(self.weights.keys() - self.parts.keys())
        if unknown:
            raise ValueError(f"weights has {unknown[0]!r}, which is not a part; the parts are {sorted(self.parts)}.")
        for name, source in self.parts.items():
            if isinstance(source, MixturePrompts):
                raise ValueError(f"part {name!r} is a mixture itself: list its parts here instead.")
            if type(source).observe is not PromptSource.observe:
                raise ValueError(
                    f"part {name!r} chooses by what was solved, which it would not be told: put the mixture into a "
                    "CurriculumPrompts instead."
                )
            if not 0.0 < self._weight(name) < math.inf:
                raise ValueError(f"weight of {name!r} must be a positive number, got {self._weight(name)}.")

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        chosen = [
            self.own(name, prompt)
            for name, share in self.shares(count).items()
            for prompt in self.parts[name].prompts(step, attempt, count=share)
        ]
        random.Random(row_key(self.seed, "mixture", step, attempt)).shuffle(chosen)  # so that ranks get similar mixes
        return chosen

    def validation(self, count: int | None = None) -> list[Problem]:
        """``count`` problems in the shares of a step, or all of every part."""
        shares = dict.fromkeys(self.parts, None) if count is None else self.shares(count)
        return [
            self.own(name, prompt) for name, share in shares.items() for prompt in self.parts[name].validation(share)
        ]

    def shares(self, count: int) -> dict[str, int]:
        """The number of prompts of each part among ``count``, by largest remainder.

        Raises:
            ValueError: ``count`` is too small for every part to give one.
        """
        total = sum(map(self._weight, self.parts))
        exact = {name: count * self._weight(name) / total for name in self.parts}
        shares = {name: math.floor(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])  # stable: first part first
        for name in by_remainder[: count - sum(shares.values())]:
            shares[name] += 1
        none = [name for name, share in shares.items() if share == 0]
        if none:
            raise ValueError(
                f"of {count} prompts, the part {none[0]!r} would give none: raise its weight or the number of prompts."
            )
        return shares

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        return self.parts[prompt.source].demonstration(replace(prompt, id=prompt.columns[PART_ID]), rng)

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> Sequence[str] | Player | None:
        return self.parts[prompt.source].demonstrated_actions(replace(prompt, id=prompt.columns[PART_ID]), rng)

    def problems(self, split: Literal["train", "val"]) -> Sequence[Problem] | None:
        """Those of every part, part after part; None where one makes its problems up."""
        lists = {name: source.problems(split) for name, source in self.parts.items()}
        listed = {name: rows for name, rows in lists.items() if rows is not None}
        return _Joined(self, listed) if len(listed) == len(lists) else None

    def leaves(self) -> dict[str, PromptSource]:
        return dict(self.parts)

    def own(self, name: str, prompt: Problem) -> Problem:
        """A part's problem as one of the mixture's: parts number theirs without knowing of each other."""
        columns = {**prompt.columns, PART_ID: prompt.id}
        return replace(prompt, id=row_key("part", name, prompt.id), source=name, columns=columns)

    def _weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)


class _Joined(Problems):
    """The lists of several parts as one, without a copy of any."""

    def __init__(self, mixture: MixturePrompts, lists: Mapping[str, Sequence[Problem]]) -> None:
        self.mixture, self.lists = mixture, lists

    def __len__(self) -> int:
        return sum(map(len, self.lists.values()))

    def __iter__(self) -> Iterator[Problem]:
        return (self.mixture.own(name, prompt) for name, rows in self.lists.items() for prompt in rows)

    def at(self, indices: Sequence[int]) -> list[Problem]:
        starts = list(accumulate(map(len, self.lists.values()), initial=0))
        named = list(self.lists.items())
        found = []
        for index in indices:
            part = bisect_right(starts, index) - 1
            name, rows = named[part]
            found.append(self.mixture.own(name, rows[index - starts[part]]))
        return found
