"""The environment that an export or a run's configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_pl.config.objects import build
from grpo_pl.environments.base import Environment
from grpo_pl.rewards.trust import check_environment_trusted


def build_environment(spec: Mapping[str, Any], *, trust: bool = False) -> Environment:
    """The environment of a ``class_path`` and its ``init_args``.

    Args:
        trust: build any class; else only those that ``grpo_pl.rewards.trust`` lets load by themselves.

    Raises:
        ValueError: a class that cannot be imported, is no environment or refuses its arguments.
    """
    if not trust:
        check_environment_trusted(spec)
    return build(Environment, dict(spec), "environment")
