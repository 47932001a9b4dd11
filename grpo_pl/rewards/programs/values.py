"""Reads what a program gave back and compares it with what was expected: in this process, which no program reaches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

MOST_KEYS = 4000
"""Most members of a set or keys of a dictionary: keys that collide make it slow to build."""
TOLERANCE = 1e-6
"""Largest difference of decimal numbers, relative to those above 1."""


class Unreadable(ValueError):
    """A line of results that no value has: the program wrote it itself, or returned what cannot be compared."""


class Other:
    """A value of some other type: equal to nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self.name}>"


def read_result(line: str) -> tuple[Any, str]:
    """(value, "") of a line that ``program_run.answer`` wrote, or (None, the error).

    Raises:
        Unreadable: it is not such a line.
    """
    try:
        told = json.loads(line)
        if isinstance(told, dict) and told.keys() == {"error"}:
            return None, str(told["error"])[:200] or "error"
        if isinstance(told, dict) and told.keys() == {"value"}:
            return _restored(told["value"]), ""
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"{type(error).__name__} in the result") from None
    raise Unreadable("no result")


def _restored(told: Any) -> Any:
    if isinstance(told, list):
        return [_restored(item) for item in told]
    if not isinstance(told, dict):
        return told
    ((kind, content),) = told.items()
    if kind == "other":
        return Other(str(content)[:50])
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(_restored(item) for item in content)
    if len(content) > MOST_KEYS:
        raise Unreadable(f"more than {MOST_KEYS} keys")
    if kind == "set":
        return {_restored(item) for item in content}
    if kind == "dict":
        return {_restored(key): _restored(item) for key, item in content}
    raise Unreadable(f"no type {kind[:50]!r}")


def same_value(found: Any, expected: Any) -> bool:
    """Whether a result is what JSON says: tuples are lists there, keys are text, decimals agree to `TOLERANCE`."""
    if isinstance(found, list | tuple):
        return isinstance(expected, list) and _all_same(found, expected)
    if isinstance(found, dict):
        if not isinstance(expected, dict) or len(found) != len(expected):
            return False
        named = {key if isinstance(key, str) else json.dumps(key, default=repr): item for key, item in found.items()}
        return named.keys() == expected.keys() and _all_same([named[key] for key in expected], list(expected.values()))
    if isinstance(found, float) or isinstance(expected, float):
        numbers = isinstance(found, int | float) and isinstance(expected, int | float)
        return numbers and near(found, expected)
    return bool(found == expected)


def _all_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(same_value, found, expected))


def near(found: float, expected: float) -> bool:
    """Whether two numbers agree to `TOLERANCE`."""
    try:
        return found == expected or math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def same_output(found: str, expected: str) -> bool:
    """Whether two texts agree line by line: white space around a line does not count, numbers may be written in
    another way, and where the expected one is a decimal it is compared with tolerance."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (found, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if max(len(found), len(expected)) > 400:
        return False
    try:
        number, wanted = Decimal(found), Decimal(expected)
    except InvalidOperation:
        return False
    if number == wanted:
        return True
    return not expected.lstrip("+-").isdecimal() and near(float(number), float(wanted))
