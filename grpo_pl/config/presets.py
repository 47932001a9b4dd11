"""Presets of the objective: a configuration names one, and all fields of the objective but the budget are read as the
preset sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

import yaml

from grpo_pl.config.shipped import CONFIGS
from grpo_pl.config.suggestions import nearest
from grpo_pl.config.terms import OBJECTIVE, merged_terms, with_nested_terms, with_terms_of_fields

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
    """All fields of the objective under the preset ``name``, except for the budget."""
    from grpo_pl.objective.fields import BUDGET, Objective  # torch, which few readers of a configuration need

    if not isinstance(name, str) or name not in presets():
        hint = nearest(str(name), presets()) or "."
        raise ValueError(f"{PRESET}: no preset {name!r}{hint} There are: {', '.join(presets())}.")
    defaults: dict[str, Any] = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(Objective)
        if field.name not in BUDGET
    }
    return defaults | presets()[name]


def preset_name(given: Mapping[str, Any]) -> str | None:
    """The preset that sets the fields of an objective so, whatever its budget; None if none does."""
    for name in presets():
        if preset_fields(name).items() <= given.items():
            return name
    return None


def with_preset_fields(
    tree: Mapping[str, Any], key: str = "", terms_before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``tree`` with all fields of a preset in the place of its name; what else the tree says of the objective wins.
    Fields of 0.3 that are terms now are terms; terms are merged by name over those of the preset, or of earlier files.

    Args:
        key: where in a configuration the tree stands, such as ``model``.
        terms_before: those of earlier files.

    Raises:
        ValueError: no such preset, or one beside a ``class_path``.
    """
    reset: dict[str, Any] = {}
    given: dict[str, Any] = {}
    tree = with_terms_of_fields(tree, key) if key == OBJECTIVE else with_nested_terms(tree, key)
    for name, value in tree.items():
        path = key if name == "init_args" else f"{key}.{name}".lstrip(".")  # a class of one's own has fields there
        if path == PRESET:
            if "class_path" in tree:
                raise ValueError(f"{PRESET}: a class of your own has its fields, and the preset, under init_args.")
            start = name.removesuffix("preset")  # `model.algorithm.` where the key is written out in one
            reset = {f"{start}{field}": default for field, default in preset_fields(value).items()}
        elif PRESET.startswith(f"{path}.") and isinstance(value, Mapping):
            given[name] = with_preset_fields(value, path, terms_before)
        else:
            given[name] = value
    terms = given.get("terms")
    if key == OBJECTIVE and isinstance(terms, Mapping) and terms:  # none at all clears those of earlier files
        given["terms"] = merged_terms(reset.get("terms", terms_before or {}), terms)
    return reset | given
