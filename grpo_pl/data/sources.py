"""``PromptSource``: the batch of prompts of a rollout step as a pure function of seed and step."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, Literal, overload

from grpo_pl.environment import Player
from grpo_pl.functional.argument_checks import check_within
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem


class Problems(Sequence[Problem]):
    """A fixed list of problems that are read when they are asked for."""

    @abstractmethod
    def at(self, indices: Sequence[int]) -> list[Problem]:
        """The problems at these indices, none of them negative, in this order."""

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return self.at(range(*index.indices(len(self))))
        return self.at([range(len(self))[index]])[0]


class PromptSource(ABC):
    """A source of prompts. Subclass as a ``@dataclass(kw_only=True)``: its fields are the YAML arguments.

    A source keeps no position: what step 17 trains on is the same whether or not steps 0 … 16 were ever asked for.
    """

    @abstractmethod
    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        """The ``count`` training prompts of rollout step ``step``; a higher ``attempt`` gives other ones. A cold
        start has the steps below 0."""

    @abstractmethod
    def validation(self, count: int | None = None) -> list[Problem]:
        """The first ``count`` held-out prompts (all of them if None), the same at every call."""

    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        """A worked completion for the cold start, or None if this source knows none. Never part of a ``Problem``."""
        return None

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> Sequence[str] | Player | None:
        """The actions of a worked episode for the cold start, to be played in the environment of the run, or a function
        that chooses them by what happens; by default the demonstration is the only one. None if this source knows
        none."""
        text = self.demonstration(prompt, rng)
        return None if text is None else [text]

    def leaves(self) -> dict[str, PromptSource]:
        """The sources that this one puts together, by the names their problems bear; itself where there are none."""
        return {"": self}

    def problems(self, split: Literal["train", "val"]) -> Sequence[Problem] | None:
        """Every problem of a split, where there is a fixed list of them; None from a source that makes them up."""
        return None

    def demonstrated(self) -> int | None:
        """Training problems that the cold start may show, which asks for steps below 0; None where they are made up
        without end."""
        rows = self.problems("train")
        return None if rows is None else len(rows)

    def leave_out(self, ids: Mapping[Literal["train", "val"], Set[int]]) -> None:
        """Never gives these problems, named by split and ``Problem.id``, again; only for a fixed list."""
        raise TypeError(f"{type(self).__name__} makes its problems up: there is no list to leave any out of.")

    def digests(self) -> dict[str, str]:
        """Name of each file or split that problems are read from (``train``, ``val`` …) -> digest of what it holds, by
        which a resumed run notices that it has changed; nothing from a source that makes its problems up."""
        return {}

    def observe(self, rates: Mapping[int, float]) -> None:  # noqa: B027 - most sources do not care
        """Told after each rollout which share of the completions of each problem, by id, was right."""

    def state_dict(self) -> dict[str, Any]:
        """The statistics of ``observe``, as tensors and plain values for the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most sources have none
        """Takes back what `state_dict` gave."""

    def init_args(self) -> dict[str, Any]:
        """The arguments that rebuild this source; they name cached results that depend on it."""
        if not is_dataclass(self):
            raise TypeError(f"{type(self).__name__} is not a dataclass: make it one, or override init_args().")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


def is_of_part(demonstrated_share: float, step: int, *identity: int | str) -> bool:
    """True if a training problem is among those of the cold start (``step`` below 0), or else of the rollouts; the two
    have none in common where the share is below 1.

    Raises:
        ValueError: a share that leaves the cold start without problems, or is no share.
    """
    check_within("(0, 1]", "data.source", demonstrated_share=demonstrated_share)
    shown = row_key("demonstrated", *identity) % 10**6 < demonstrated_share * 10**6
    return demonstrated_share == 1.0 or shown == (step < 0)
