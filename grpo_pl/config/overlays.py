"""What a later configuration keeps of an earlier one: the fields of the same class, nothing of another."""

from __future__ import annotations

import importlib
from typing import Any

from jsonargparse import _typehints


def keep_fields_of_the_same_class_only() -> None:
    """Makes jsonargparse forget all ``init_args`` of a class that another takes the place of.

    By itself it keeps those that the new class accepts as well, also from item to item of two lists of equal length: a
    reward in the place of another would get its weight. Its one function for that is private, hence this file.
    """
    assert callable(_discard), "jsonargparse has moved this function"
    _typehints.discard_init_args_on_class_path_change = _forget_another_class


_discard = _typehints.discard_init_args_on_class_path_change


def _forget_another_class(parser_or_action: Any, prev_val: Any, value: Any) -> None:
    before = prev_val["class_path"] if prev_val and "init_args" in prev_val else None
    if before is None:  # such as fields of a dataclass, which were given without a class
        _discard(parser_or_action, prev_val, value)
    elif not _same_class(before, value["class_path"]):
        prev_val.pop("init_args")
        prev_val.pop("dict_kwargs", None)


def _same_class(one: str, other: str) -> bool:
    """Whether two paths lead to one class, which a package may offer in several places."""
    return one == other or _named(one) is _named(other)


def _named(path: str) -> Any:
    """What a dotted path leads to, or the path itself where it leads nowhere: the parser complains about that."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return path
