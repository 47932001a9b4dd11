"""Shipped configurations, by the names that the documentation uses: ``configs/quickstart.yaml``, wherever one is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CONFIGS = (Path(__file__).parents[1] / "configs").resolve()
"""The project's ``configs`` folder; in a checkout a link to it."""
FLAGS = ("-c", "--config", "--overlay")


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Arguments in which ``--config configs/quickstart.yaml`` means the shipped file where there is none here."""

    named = list(args)
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if equals and flag in FLAGS:
            named[i] = f"{flag}={shipped_file(value)}"
        elif i and args[i - 1] in FLAGS:
            named[i] = shipped_file(arg)
    return named


def shipped_file(path: str) -> str:
    """A path; that of a shipped file where it begins with ``configs/`` and there is none here."""
    folder, *rest = Path(path).parts or [""]
    file = CONFIGS.joinpath(*rest)
    return str(file) if folder == CONFIGS.name and rest and not Path(path).exists() and file.is_file() else path


def short_name(path: Path) -> str:
    """The path to type for a configuration: ``configs/…`` for a shipped one."""
    return str(Path(CONFIGS.name) / path.relative_to(CONFIGS)) if path.is_relative_to(CONFIGS) else str(path)
