"""Settings of a verb without a Trainer, from any number of ``--config`` and options of the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from grpo_pl.config.objects import Config, ConfigError, read, values_of
from grpo_pl.config.suggestions import nearest

ConfigArguments = str | Path | list[str] | None
"""One file, or several files and options such as ``--data.source.digits=3``, in their order."""


def settings(given: ConfigArguments, *keys: str) -> Config:
    """The settings that a verb reads, of which it uses those under ``keys``, such as ``data.source``."""
    items = [str(given)] if isinstance(given, str | Path) else given or []
    options = [item for item in items if item.startswith("--")]
    for option in options:
        name = option.partition("=")[0].removeprefix("--")
        if not any(f"{name}.".startswith((f"{key}.", f"{key}+.")) for key in keys):
            hint = nearest(name, keys) or f": of a configuration, this command reads {', '.join(keys)}"
            raise ConfigError(f"unknown option --{name}{hint}")
    return read([item for item in items if not item.startswith("--")], options)


def gather(args: Sequence[str]) -> list[str]:
    """Arguments in which every ``--config`` and every option with a dot has become one ``--config``, as `settings`
    reads it."""
    rest: list[str] = []
    options: list[str] = []
    waiting = list(args)
    while waiting:
        arg = waiting.pop(0)
        flag, equals, _ = arg.partition("=")
        if not (flag == "--config" or (flag.startswith("--") and "." in flag)) or not (equals or waiting):
            rest.append(arg)
        else:
            options.append(arg if equals else f"{arg}={waiting.pop(0)}")
    files = values_of(options, "--config")
    items = [*files, *(option for option in options if not option.startswith("--config="))]
    if items:
        rest.append(f"--config={items[0] if items == files and len(items) == 1 else json.dumps(items)}")
    return rest
