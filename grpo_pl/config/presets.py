"""Shipped configurations, by the names that the documentation uses, and presets of the objective among them.

A configuration names a preset, and all fields of the objective but the budget are read as the preset sets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_pl.config.suggestions import nearest

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
"""The project's ``configs`` folder; in a checkout a link to it."""
FLAGS = ("-c", "--config", "--overlay")
OBJECTIVE = "model.algorithm"
"""Key of the objective in a configuration."""
PRESET = f"{OBJECTIVE}.preset"
"""Key that names a preset. It is not a field: resolved configurations have the fields in its place."""


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Arguments in which ``--config configs/quickstart.yaml`` means the shipped file where there is none here."""

    def shipped(path: str) -> str:
        folder, *rest = Path(path).parts or [""]
        file = CONFIGS.joinpath(*rest)
        return str(file) if folder == CONFIGS.name and rest and not Path(path).exists() and file.is_file() else path

    named = list(args)
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if equals and flag in FLAGS:
            named[i] = f"{flag}={shipped(value)}"
        elif i and args[i - 1] in FLAGS:
            named[i] = shipped(arg)
    return named


def short_name(path: Path) -> str:
    """The path to type for a configuration: ``configs/…`` for a shipped one."""
    return str(Path(CONFIGS.name) / path.relative_to(CONFIGS)) if path.is_relative_to(CONFIGS) else str(path)


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
    defaults = {field.name: field.default for field in fields(Objective) if field.name not in BUDGET}
    return defaults | presets()[name]


def preset_name(given: Mapping[str, Any]) -> str | None:
    """The preset that sets the fields of an objective so, whatever its budget; None if none does."""
    for name in presets():
        if preset_fields(name).items() <= given.items():
            return name
    return None


def with_preset_fields(tree: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """``tree`` with all fields of a preset in the place of its name; what else the tree says of the objective wins.

    Args:
        key: where in a configuration the tree stands, such as ``model``.

    Raises:
        ValueError: no such preset, or one beside a ``class_path``.
    """
    reset: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name, value in tree.items():
        path = key if name == "init_args" else f"{key}.{name}".lstrip(".")  # a class of one's own has fields there
        if path == PRESET:
            if "class_path" in tree:
                raise ValueError(f"{PRESET}: a class of your own has its fields, and the preset, under init_args.")
            start = name.removesuffix("preset")  # `model.algorithm.` where the key is written out in one
            reset = {f"{start}{field}": default for field, default in preset_fields(value).items()}
        elif PRESET.startswith(f"{path}.") and isinstance(value, Mapping):
            given[name] = with_preset_fields(value, path)
        else:
            given[name] = value
    return reset | given
