"""Environments of many turns: text in, text out, in Gymnasium's terms; adapters for those of others, and a pool."""

from grpo_pl.environment import (
    Conversation,
    Environment,
    EnvironmentMistake,
    Observation,
    Player,
    PolicyFault,
    Transition,
    episode_value,
    play,
)
from grpo_pl.extras.agents.pool import EnvironmentPool, PoolLimits

__all__ = [
    "Conversation",
    "Environment",
    "EnvironmentMistake",
    "EnvironmentPool",
    "Observation",
    "Player",
    "PolicyFault",
    "PoolLimits",
    "Transition",
    "episode_value",
    "play",
]
