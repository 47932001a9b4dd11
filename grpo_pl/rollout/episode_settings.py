"""``EpisodeSettings``: limits of an environment's episodes, and the check that the model's context has room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from grpo_pl.environment import Environment, PoolLimits
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.policy.dialogue import Dialogue, PlainTurns
from grpo_pl.policy.template import Fits
from grpo_pl.types import SamplingParams

Seen = Literal["last_action", "exchange"]


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings(PoolLimits):
    """Limits of the episodes of ``model.environment``; ``sampling.max_completion_length`` is that of each action."""

    max_turns: int = 8
    """Most actions."""
    max_episode_tokens: int = 0
    """Most tokens behind the prompt, observations included; 0 takes what the model's context holds."""
    rewards_see: Seen = "last_action"
    """What rewards of texts read as the completion: the last action, or all that follows the prompt, observations
    included; segments after the first stand in an order that follows from their prompts, not from the time."""
    plain_turns: PlainTurns = field(default_factory=PlainTurns)
    """How turns are written for a tokenizer without chat template."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}.")
        if self.max_episode_tokens < 0:
            raise ValueError(f"max_episode_tokens must be 0 (off) or more, got {self.max_episode_tokens}.")
        check_choice("episodes.rewards_see", self.rewards_see, Seen)

    def most_actions(self, sampling: SamplingParams, context: int | None) -> int:
        """Most tokens that the policy can write in an episode, as far as the limits and the model's context say."""
        written = self.max_turns * sampling.max_completion_length
        return min(written, self.max_episode_tokens or context or written)

    def check_context(self, dialogue: Dialogue, environment: Environment, context: int) -> int:
        """The tokens behind a prompt that an episode may have, or has at least once it reaches its last turn.

        Raises:
            ValueError: a template that rewrites earlier turns, or that shapes questions where an agent writes the
                prompts; limits for which the context has no room.
        """
        if environment.writes_prompt and (dialogue.template.user != "{question}" or dialogue.template.examples):
            raise ValueError(
                f"template.user and template.examples shape the question, but {type(environment).__name__} writes its "
                "own prompts: leave both out."
            )
        role = environment.observation_role
        dialogue.check(role)
        between = len(dialogue.observation_ids("" if role == "user" else [{"role": role, "content": ""}], None))
        least = self.max_turns + (self.max_turns - 1) * between  # one token an action, nothing to show
        most = self.max_episode_tokens
        if 0 < most < least:
            raise ValueError(
                f"max_turns={self.max_turns} takes {least} tokens at the very least, {between} of them between two "
                f"actions: max_episode_tokens={most} can never hold that."
            )
        if most >= context:
            raise ValueError(
                f"episodes.max_episode_tokens is {most}, but the model's context of {context} must hold a prompt too."
            )
        if least >= context:
            raise ValueError(
                f"max_turns={self.max_turns} (at least {least} tokens) exceeds the model's context of {context} "
                "whatever the prompt: lower it."
            )
        return most or least

    def fits(self, dialogue: Dialogue, environment: Environment, context: int) -> Fits:
        """Tells whether a prompt leaves room for an episode; the environment's first observation is not known yet."""
        length = self.check_context(dialogue, environment, context)
        setting = "episodes.max_episode_tokens" if self.max_episode_tokens else "episodes.max_turns"
        return Fits(dialogue.prompt_ids, context=context, length=length, setting=setting)
