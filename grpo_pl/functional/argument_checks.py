"""Checks of arguments: names of options that exist, and numbers not below their minimum."""

from __future__ import annotations

import math
from typing import Any, get_args


def check_at_least(least: int, section: str, **values: float) -> None:
    """Refuses values of a section of the configuration that are below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{section} needs {name} >= {least}, got {value}.")


def check_positive(**values: float) -> None:
    """Refuses values that are not above 0, or that are infinite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")


def check_choice(argument: str, value: object, choices: Any, classes: tuple[type, ...] = ()) -> None:
    """Refuses a value that is not among the names of ``choices``, a ``Literal``.

    Args:
        classes: base classes whose objects the argument takes as well; only named in the message.
    """
    names = get_args(choices)
    if value not in names:
        own = "".join(f", or an object of a class of {kind.__name__}" for kind in classes)
        raise ValueError(f"{argument} is {value!r}: choose one of {', '.join(map(str, names))}{own}.")
