"""``EnvironmentReward``: the return of an episode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score, Status

_OF_THE_POLICY: Mapping[str, Status] = {
    "timeout": "timeout",
    "killed": "killed",
    "raised": "crashed",
    "too_long": "too_long",
}
"""Status of an environment's step that failed -> status of the score, if the environment has ``blame: policy``."""


@dataclass(kw_only=True)
class EnvironmentReward(Reward):
    """The return of an episode, Σ_t r_t; None if the episode was ended by something that is not the policy's fault.

    With a term that credits turns (``TurnReturns``, ``GiGPO``) each turn is credited with its own reward; all other
    rewards are credited to the last turn. To train on the return and count success by a threshold, give this reward
    twice, the second with ``threshold``, ``correctness: true`` and ``weight: 0``."""

    trusted = True
    name: str = "environment"
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right: a return of 1 or more, or one that
    reaches ``threshold``."""
    threshold: float | None = None
    """The reward is 1 for a return that reaches this number, and 0 for a lower one; null gives the return itself."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be a finite number or null, got {self.threshold}.")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"episode"}

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        if "episode" not in columns:
            raise MissingColumn(
                f"reward {self.name!r} needs the column 'episode', which the episodes of model.environment have."
            )
        return [self._score(episode) for episode in columns["episode"]]

    def _score(self, episode: Any) -> Score:
        try:
            value, status, detail = episode["return"], episode["status"], str(episode.get("detail", ""))
            turns = tuple(float(turn["reward"]) for turn in episode["turns"])
            known = value is None or all(map(math.isfinite, (value, *turns)))
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise MissingColumn(f"reward {self.name!r}: {str(episode)[:80]!r} is no episode ({error!r}).") from error
        if not known:
            raise MissingColumn(
                f"reward {self.name!r}: the return of an episode is {value}, of turns {turns}"[:200]
                + ": no finite numbers."
            )
        if value is None:
            return Score(None, "unavailable", detail)
        value = float(value if self.threshold is None else value >= self.threshold)
        judged: Status = "ok" if value >= 1.0 else "wrong"
        return Score(value, _OF_THE_POLICY.get(status, judged), detail, turns=turns if self.threshold is None else None)
