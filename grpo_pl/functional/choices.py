"""One check for every argument that names a choice: a name that does not exist is refused, never another formula."""

from __future__ import annotations

from typing import Any, get_args


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
