"""``EpisodeSettings``: how the episodes of an environment are played, as a configuration says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from grpo_pl.environments.limits import PoolLimits
from grpo_pl.functional.choices import check_choice
from grpo_pl.policy.dialogue import PlainTurns
from grpo_pl.rollout.episodes import EpisodeLimits
from grpo_pl.types import SamplingParams

Seen = Literal["last_action", "exchange"]


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings(EpisodeLimits, PoolLimits):
    """Limits of the episodes of ``model.environment``; ``sampling.max_completion_length`` is that of each action."""

    rewards_see: Seen = "last_action"
    """What rewards of texts read as the completion: the last action, or all that follows the prompt, observations
    included."""
    plain_turns: PlainTurns = field(default_factory=PlainTurns)
    """How turns are written for a tokenizer without chat template."""

    def __post_init__(self) -> None:
        EpisodeLimits.__post_init__(self)
        PoolLimits.__post_init__(self)
        check_choice("episodes.rewards_see", self.rewards_see, Seen)

    def most_actions(self, sampling: SamplingParams, context: int | None) -> int:
        """Most tokens that the policy can write in an episode, as far as the limits and the model's context say."""
        written = self.max_turns * sampling.max_completion_length
        return min(written, self.max_episode_tokens or context or written)
