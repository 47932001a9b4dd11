"""From ``class_path`` and ``init_args`` back to a reward, without the command-line parser."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from grpo_pl.rewards.base import Reward


def build_reward(spec: Mapping[str, Any]) -> Reward:
    """The reward that `Reward.spec` described; rewards among the arguments are built as well.

    Raises:
        ValueError: no such class, not a reward, or arguments that it refuses.
    """
    class_path = str(spec.get("class_path", ""))
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"reward {class_path!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Reward)):
        raise ValueError(f"{class_path!r} is not a reward.")
    arguments = {key: _build_nested(value) for key, value in (spec.get("init_args") or {}).items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ValueError(f"reward {class_path!r} does not take these arguments: {error}") from error


def _build_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        is_spec = "class_path" in value
        return build_reward(value) if is_spec else {key: _build_nested(inner) for key, inner in value.items()}
    return [_build_nested(inner) for inner in value] if isinstance(value, list) else value
