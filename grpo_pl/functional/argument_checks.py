"""Checks of arguments: names of options that exist, and numbers within their limits."""

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


def check_within(interval: str, section: str, **values: float) -> None:
    """Refuses values of a section of the configuration outside of an interval such as ``[0, 1)``, which excludes 1."""
    low, high = map(float, interval[1:-1].split(","))
    for name, value in values.items():
        above = value >= low if interval.startswith("[") else value > low
        below = value <= high if interval.endswith("]") else value < high
        if not (above and below):
            raise ValueError(f"{section} needs {name} in {interval}, got {value}.")


def check_choice(argument: str, value: object, choices: Any, classes: tuple[type, ...] = ()) -> None:
    """Refuses a value that is not among the names of ``choices``, a ``Literal``.

    Args:
        classes: base classes whose objects the argument takes as well; only named in the message.
    """
    names = get_args(choices)
    if value not in names:
        own = "".join(f", or an object of a class of {kind.__name__}" for kind in classes)
        raise ValueError(f"{argument} is {value!r}: choose one of {', '.join(map(str, names))}{own}.")
