"""Rebuilding the rewards that a policy was trained on; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.scoring import check_rewards


def build_rewards(specs: Sequence[Mapping[str, Any]]) -> list[Reward]:
    """The rewards of ``class_path`` and ``init_args`` pairs, as an export or a run's configuration holds them.

    Raises:
        ValueError: a class that cannot be imported or is no reward, or a list that :func:`check_rewards` refuses.
    """
    rewards = [_build(spec["class_path"], spec.get("init_args") or {}) for spec in specs]
    check_rewards(rewards)
    return rewards


def _build(class_path: str, arguments: Mapping[str, Any]) -> Reward:
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import the reward {class_path!r} that this model was trained on: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Reward)):
        raise ValueError(f"{class_path!r} is not a Reward.")
    return kind(**arguments)
