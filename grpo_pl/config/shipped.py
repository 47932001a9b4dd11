"""Shipped configurations by the names that the documentation uses, wherever the package is installed."""

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
            named[i] = f"{flag}={_shipped(value)}"
        elif i and args[i - 1] in FLAGS:
            named[i] = _shipped(arg)
    return named


def _shipped(path: str) -> str:
    folder, *rest = Path(path).parts or [""]
    shipped = CONFIGS.joinpath(*rest)
    return str(shipped) if folder == CONFIGS.name and rest and not Path(path).exists() and shipped.is_file() else path


def short_name(path: Path) -> str:
    """What to type for a configuration: ``configs/…`` for a shipped one."""
    return str(Path(CONFIGS.name) / path.relative_to(CONFIGS)) if path.is_relative_to(CONFIGS) else str(path)


def values_of(args: Sequence[str], *flags: str) -> list[str]:
    """What ``--flag VALUE`` and ``--flag=VALUE`` give to any of ``flags``, in their order."""
    values = []
    for arg, after in zip(args, [*args[1:], None], strict=False):
        flag, equals, value = arg.partition("=")
        if flag in flags and (equals or after is not None):
            values.append(value if equals else str(after))
    return values
