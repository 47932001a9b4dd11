"""Reads configurations of version 0.3, on the way to the parser; version 0.5 refuses what has moved or is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED: dict[str, tuple[Any, str]] = {
    "model.strategy_checked": (False, "is gone: trainer.strategy is one of ddp and FSDP2Strategy, or a subclass."),
    "trainer.strategy.tensor_parallel_size": (1, "is gone, with tensor parallelism: set it to 1, and FSDP2 shards."),
}
"""Field of 0.3 -> its default, which resolved configurations hold, and what to do about another value."""


def without_removed_fields(tree: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """``tree`` without the fields of 0.3 that are gone.

    Args:
        key: where in a configuration the tree stands, such as ``model``.

    Raises:
        ValueError: one of them has a value that meant something.
    """
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        path = key if name == "init_args" else f"{key}.{name}".lstrip(".")
        if path in REMOVED:
            idle, advice = REMOVED[path]
            if value != idle:
                raise ValueError(f"{path} {advice}")
        elif isinstance(value, Mapping) and any(field.startswith(f"{path}.") for field in REMOVED):
            kept[name] = without_removed_fields(value, path)
        else:
            kept[name] = value
    return kept
