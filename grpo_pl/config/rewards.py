"""The rewards that an export or a run's configuration names, built with the checks of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_pl.config.objects import build
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.batch import check_rewards
from grpo_pl.rewards.trust import check_rewards_trusted


def build_rewards(specs: Sequence[Mapping[str, Any]], *, trust_rewards: bool = False) -> list[Reward]:
    """The rewards of ``class_path`` and ``init_args`` pairs, with those that they hold in turn.

    Args:
        trust_rewards: build any class; else only those that ``grpo_pl.rewards.trust`` lets load by themselves.

    Raises:
        ValueError: a class that cannot be imported, is no reward or refuses its arguments, or a list that
            ``check_rewards`` refuses.
    """
    if not trust_rewards:
        check_rewards_trusted(specs)
    rewards = build(list[Reward], list(specs), "rewards")
    check_rewards(rewards)
    return rewards
