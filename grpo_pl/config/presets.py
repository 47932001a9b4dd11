"""Presets of the objective: a configuration names one, and all fields of the objective but the budget are read as the
preset sets them."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import yaml

from grpo_pl.config.shipped import CONFIGS
from grpo_pl.config.terms import EARLIER, OBJECTIVE, ROOM, merged_terms, with_nested_terms, with_terms_of_fields

PRESET = f"{OBJECTIVE}.preset"
"""Key that names a preset. It is not a field: resolved configurations have the fields in its place."""


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Name -> what the shipped preset changes of the defaults."""
    files = sorted((CONFIGS / "algorithm").glob("*.yaml"))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it
    given = {file.stem: yaml.load(file.read_text(encoding="utf-8"), loader)["model"]["algorithm"] for file in files}
    return {name: {key: value for key, value in own.items() if key != "preset"} for name, own in given.items()}


def preset_fields(name: Any) -> dict[str, Any]:
    """All fields of the objective under the preset ``name``, except for the budget, as `GRPOAlgorithm` takes them.

    Raises:
        ValueError: no such preset.
    """
    plain = preset_values(name)
    return {**plain, "terms": {name: _kind(spec)(**spec["init_args"]) for name, spec in _whole(plain["terms"]).items()}}


def preset_values(name: Any) -> dict[str, Any]:
    """`preset_fields` as plain values."""
    from grpo_pl.config.suggestions import nearest
    from grpo_pl.objective.fields import BUDGET, Objective  # torch, which few readers of a configuration need

    if not isinstance(name, str) or name not in presets():
        hint = nearest(str(name), presets()) or "."
        raise ValueError(f"{PRESET}: no preset {name!r}{hint} There are: {', '.join(presets())}.")
    defaults: dict[str, Any] = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(Objective)
        if field.name not in BUDGET
    }
    return defaults | copy.deepcopy(presets()[name])  # the parser builds terms in their place


def preset_name(given: Mapping[str, Any]) -> str | None:
    """The preset that sets the fields of an objective so, whatever its budget, or the nearest with one or two fields
    that are others, such as ``dapo, beta 0.1``; None if none does."""
    terms = given.get("terms") or {}
    found = {**given, "terms": _whole(terms)}
    near: list[list[str]] = []
    for name in presets():
        own = preset_values(name)
        if {key: term["class_path"] for key, term in own["terms"].items()} != {
            key: term["class_path"] for key, term in terms.items()
        }:
            continue  # before its terms are imported
        own["terms"] = _whole(own["terms"])
        others = [key for key, value in own.items() if found.get(key) != value]
        if len(others) <= 2 and "terms" not in others and found.keys() >= own.keys():
            near.append([name, *(f"{key} {found[key]}" for key in others)])
    nearest = min(near, key=len, default=None)
    return None if nearest is None else ", ".join(nearest)


def _whole(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Terms as a configuration holds them, with the arguments that are left at their defaults; a stranger's as it is,
    since it is not imported."""
    whole: dict[str, Any] = dict(terms)
    for name, term in terms.items():
        if str(term["class_path"]).startswith(f"{ROOM}."):
            parameters = inspect.signature(_kind(term)).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            whole[name] = {**term, "init_args": defaults | (term.get("init_args") or {})}
    return whole


def _kind(term: Mapping[str, Any]) -> Callable[..., Any]:
    module, _, name = str(term["class_path"]).rpartition(".")
    kind: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return kind


def _arguments(class_path: str) -> Collection[str]:
    """Names of the arguments of a class; none where there is no such class, which the parser tells."""
    try:
        return inspect.signature(_kind({"class_path": class_path})).parameters.keys()
    except (ImportError, AttributeError, TypeError, ValueError):
        return ()


def with_preset_fields(
    tree: Mapping[str, Any],
    key: str = "",
    terms_before: Mapping[str, Any] | None = None,
    waiting: dict[str, Any] | None = None,
    class_path: str | None = None,
) -> dict[str, Any]:
    """``tree`` with all fields of a preset in the place of its name; what else the tree says of the objective wins.
    Fields of 0.3 that are terms now are terms; terms are merged by name over those of the preset, or of earlier files.

    Args:
        key: where in a configuration the tree stands, such as ``model``.
        terms_before: those of earlier files.
        waiting: see `with_terms_of_fields`; a preset resets it.
        class_path: class of the objective in earlier files, if it is one of the user's own.

    Raises:
        ValueError: no such preset, or one beside a ``class_path``; as `with_terms_of_fields`.
    """
    reset: dict[str, Any] = {}
    given: dict[str, Any] = {}
    if key == OBJECTIVE:
        named = tree.get("preset")
        if named is not None and waiting:
            waiting.clear()
        before = terms_before if named is None else preset_values(named)["terms"]
        class_path = tree.get("class_path", class_path)
        own = _arguments(class_path) if class_path and EARLIER & tree.keys() else ()
        tree = with_terms_of_fields(tree, key, before, waiting, own)
    else:
        tree = with_nested_terms(tree, key)
    for name, value in tree.items():
        path = key if name == "init_args" else f"{key}.{name}".lstrip(".")  # a class of one's own has fields there
        if path == PRESET:
            if "class_path" in tree:
                raise ValueError(f"{PRESET}: a class of your own has its fields, and the preset, under init_args.")
            reset = preset_values(value)
        elif PRESET.startswith(f"{path}.") and isinstance(value, Mapping):
            given[name] = with_preset_fields(value, path, terms_before, waiting, class_path)
        else:
            given[name] = value
    terms = given.get("terms")
    if key == OBJECTIVE and isinstance(terms, Mapping) and terms:  # none at all clears those of earlier files
        given["terms"] = merged_terms(reset.get("terms", terms_before or {}), terms)
    return reset | given
