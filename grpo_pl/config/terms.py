"""Terms of the objective in configurations: merged by name over overlays; fields of 0.3 that are terms now."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

OBJECTIVE = "model.algorithm"
"""Key of the objective in a configuration."""
TERMS = f"{OBJECTIVE}.terms"
"""Key of the terms in a configuration, a mapping of names to ``class_path`` and ``init_args``."""


@dataclass(frozen=True)
class Moved:
    """Fields of the objective in 0.3 that belong to one term now."""

    name: str
    class_path: str
    switch: str
    """The field that said whether there is such a term."""
    off: Any
    """Its value where there is none."""
    fields: Mapping[str, str]
    """Field of 0.3 -> field of the term."""


MOVED_FIELDS = (Moved("anchor", "grpo_pl.objective.terms.anchor.Anchor", "anchor_coef", 0.0, {"anchor_coef": "coef"}),)


def merged_terms(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` over ``before``, name by name: null removes a term, the same or no class keeps what is not given."""
    merged: dict[str, Any] = dict(before)
    for name, term in given.items():
        old: Any = merged.get(name)
        new: Any = {"class_path": term} if isinstance(term, str) else term
        both = isinstance(new, Mapping) and isinstance(old, Mapping)
        if both and new.get("class_path") in (None, old["class_path"]):
            arguments = {**(old.get("init_args") or {}), **(new.get("init_args") or {})}
            new = {**new, "class_path": old["class_path"], "init_args": arguments}
        if new is None:
            merged.pop(name, None)
        else:
            merged[name] = new
    return merged


def with_nested_terms(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """``tree`` with keys such as ``model.algorithm.terms``, or a field of 0.3 that is a term now, written out as
    mappings.

    Args:
        key: where in a configuration the tree stands, such as ``model``.
    """
    fields = {f"{OBJECTIVE}.{name}" for moved in MOVED_FIELDS for name in moved.fields}
    nested: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{key}.{name}".lstrip(".")
        *parents, last = name.split(".") if path in fields or f"{path}.".startswith(f"{TERMS}.") else [name]
        inner = nested
        for parent in parents:
            inner[parent] = dict(inner.get(parent) or {})
            inner = inner[parent]
        both = isinstance(value, Mapping) and isinstance(inner.get(last), Mapping)
        inner[last] = {**inner[last], **value} if both else value
    return nested


def with_terms_of_fields(objective: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """The fields of an objective with those of 0.3 as terms; each that acts is told once, with its place now.

    Args:
        key: where the fields stand, for the line that tells; none tells nothing.
    """
    kept, terms = dict(objective), dict[str, Any]()
    for moved in MOVED_FIELDS:
        found = {name: kept.pop(name) for name in moved.fields if name in kept}
        if not found:
            continue
        arguments = {moved.fields[name]: value for name, value in found.items()}
        if found[moved.switch] == moved.off:
            terms[moved.name] = None
        else:
            terms[moved.name] = {"class_path": moved.class_path, "init_args": arguments}
            if key:
                _tell(
                    f"{key}.{moved.switch} is {TERMS}.{moved.name} now: class_path {moved.class_path}, init_args "
                    f"{arguments}. Version 0.5 will not read the old field."
                )
    return {**kept, "terms": merged_terms(terms, kept.get("terms") or {})} if terms else kept


@cache
def _tell(line: str) -> None:
    print(line, file=sys.stderr)
