"""Reads configurations of version 0.3, on the way to the parser; version 0.5 refuses what has moved or is gone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from grpo_pl.processes.rank import is_first_process

REMOVED: dict[str, tuple[Any, str]] = {
    "model.strategy_checked": (False, "is gone: trainer.strategy is one of ddp and FSDP2Strategy, or a subclass."),
    "trainer.strategy.tensor_parallel_size": (1, "is gone, with tensor parallelism: set it to 1, and FSDP2 shards."),
}
"""Field of 0.3 -> its default, which resolved configurations hold, and what to do about another value."""
IGNORED = {
    "ReasoningGymPrompts": {
        "worked_share": "does nothing now: demonstrations give the answer alone. Version 0.5 will refuse it.",
    },
}
"""Class, by the last part of its path -> its fields of 0.3 that are left out with one line, whatever their value."""


def without_removed_fields(tree: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """``tree`` without the fields of 0.3 that are gone.

    Args:
        key: where in a configuration the tree stands, such as ``model``.

    Raises:
        ValueError: one of them has a value that meant something.
    """
    kept: dict[str, Any] = {}
    ignored = IGNORED.get(str(tree.get("class_path")).rpartition(".")[2], {})
    for name, value in tree.items():
        path = key if name == "init_args" else f"{key}.{name}".lstrip(".")
        if name == "init_args" and ignored and isinstance(value, Mapping):
            for field in ignored.keys() & value.keys():
                _tell(f"{path}.{field}", ignored[field])
            value = {field: given for field, given in value.items() if field not in ignored}
        if path in REMOVED:
            idle, advice = REMOVED[path]
            if value != idle:
                raise ValueError(f"{path} {advice}")
        elif isinstance(value, Mapping):
            kept[name] = without_removed_fields(value, path)
        else:
            kept[name] = value
    return kept


@cache
def _tell(path: str, what: str) -> None:
    """Says so once: the parser reads a file several times."""
    if is_first_process():
        print(f"{path} {what}", file=sys.stderr)
