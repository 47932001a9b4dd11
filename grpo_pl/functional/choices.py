"""Checks of arguments: a choice that does not exist is refused, never another formula, and so is too small a number."""

from __future__ import annotations

from typing import Any, get_args


def check_at_least(least: int, section: str, **values: float) -> None:
    """Refuses values of a section of the configuration that are below ``least``.

    Raises:
        ValueError: the first one, by its name.
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{section} needs {name} >= {least}, got {value}.")


def check_choice(argument: str, value: object, choices: Any, classes: tuple[type, ...] = ()) -> None:
    """Refuses a value that is not among the names of ``choices``, a ``Literal``.

    Args:
        classes: what the argument also takes objects of, for the message.

    Raises:
        ValueError: the argument, its value and all choices.
    """
    names = get_args(choices)
    if value not in names:
        own = "".join(f", or an object of a class of {kind.__name__}" for kind in classes)
        raise ValueError(f"{argument} is {value!r}: choose one of {', '.join(map(str, names))}{own}.")
