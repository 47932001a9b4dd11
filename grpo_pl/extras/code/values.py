"""Reads the results of a program and compares them with the expected ones, in this process, which no program reaches.

Every comparison is total: whatever a program writes, the answer is yes or no.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

MOST_KEYS = 4000
"""Most members of a set or keys of a dictionary: keys that collide make it slow to build."""
LONGEST_RANGE = 100_000
"""Most members of a range that is read: it costs nothing to write and much to look through."""
MOST_PLACES = 5000
"""Most digits before or behind the point of a decimal that is read: ``int`` of 1e999999999 never ends."""
TOLERANCE = 1e-6
"""Largest difference of decimal numbers, relative to those above 1."""
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_LONGEST_NUMBER = 400
INCOMPARABLE = (ArithmeticError, TypeError, ValueError, AttributeError, LookupError, RecursionError, MemoryError)
"""Exceptions of Python on values of built-in types that do not fit together."""


class Unreadable(ValueError):
    """A line of results that no value has: the program wrote it itself, or returned what cannot be compared."""


class Other:
    """A value of some other type: equal to nothing; its items can be looked through, if it has any."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, items: Sequence[Any] | None = None) -> None:
        self.name, self.items = name, items

    def __iter__(self) -> Iterator[Any]:
        if self.items is None:
            raise TypeError(f"{self.name} is not iterable")
        return iter(self.items)

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
        written = json.loads(line)
        if isinstance(written, dict) and written.keys() == {"error"}:
            return None, str(written["error"])[:200] or "error"
        if isinstance(written, dict) and written.keys() == {"value"}:
            return _restored(written["value"]), ""
    except Unreadable:
        raise
    except INCOMPARABLE as error:
        raise Unreadable(f"{type(error).__name__} in the result") from None
    raise Unreadable("no result")


def _restored(written: Any) -> Any:
    if isinstance(written, list):
        return [_restored(item) for item in written]
    if not isinstance(written, dict):
        return written
    ((kind, content),) = written.items()
    if kind == "other":
        name, *items = content
        return Other(str(name)[:50], *map(_restored, items))
    if kind in _KEYED and len(content) > MOST_KEYS:
        raise Unreadable(f"more than {MOST_KEYS} keys")
    if kind not in _RESTORE:
        raise Unreadable(f"no type {kind[:50]!r}")
    return _RESTORE[kind](content)


def _dictionary(pairs: Any) -> dict[Any, Any]:
    return {_restored(key): _restored(item) for key, item in pairs}


def short_range(bounds: Any) -> range:
    found = range(*bounds)
    if not -LONGEST_RANGE <= (found.stop - found.start) // found.step <= LONGEST_RANGE:
        raise Unreadable(f"a range of more than {LONGEST_RANGE} members")
    return found


def _decimal(text: Any) -> Decimal:
    found = Decimal(str(text))
    if found.is_snan() or (found.is_finite() and abs(found.adjusted()) > MOST_PLACES):
        raise Unreadable("a decimal that cannot be compared")
    return found


_RESTORE: Mapping[str, Callable[[Any], Any]] = {
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(_restored, items)),
    "deque": lambda items: deque(map(_restored, items)),
    "iterator": lambda items: iter(list(map(_restored, items))),
    "set": lambda items: set(map(_restored, items)),
    "dict": _dictionary,
    "keys": lambda items: dict.fromkeys(map(_restored, items)).keys(),
    "values": lambda items: dict(enumerate(map(_restored, items))).values(),
    "items": lambda pairs: _dictionary(pairs).items(),
    "range": short_range,
    "fraction": lambda pair: Fraction(*map(int, pair)),
    "decimal": _decimal,
    "complex": lambda pair: complex(*pair),
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
}
"""Key of a value in ``program_run.plain`` -> function that makes the value again."""
_KEYED = frozenset({"set", "dict", "keys", "items"})


def same_value(found: Any, expected: Any) -> bool:
    """True if a result equals the JSON: tuples are lists there, keys are text, a fraction or decimal is a number, and
    decimals agree to `TOLERANCE`."""
    try:
        return _same_value(found, expected)
    except INCOMPARABLE:
        return False


def _same_value(found: Any, expected: Any) -> bool:
    if isinstance(found, list | tuple):
        return isinstance(expected, list) and _all_same(found, expected)
    if isinstance(found, dict):
        if not isinstance(expected, dict) or len(found) != len(expected):
            return False
        named = {key if isinstance(key, str) else json.dumps(key, default=repr): item for key, item in found.items()}
        return named.keys() == expected.keys() and _all_same([named[key] for key in expected], list(expected.values()))
    if isinstance(found, float | Fraction | Decimal) or isinstance(expected, float):
        numbers = isinstance(found, int | float | Fraction | Decimal) and isinstance(expected, int | float)
        return numbers and near(found, expected)
    return bool(found == expected)


def _all_same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(_same_value, found, expected))


def near(found: Any, expected: float) -> bool:
    """True if two real numbers agree to `TOLERANCE`."""
    try:
        return bool(found == expected) or math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except (ArithmeticError, ValueError):  # an integer beyond all floats, a NaN that signals
        return False


def same_output(found: str, expected: str) -> bool:
    """True if two texts agree line by line: white space around a line does not count, numbers may be written in
    another way, and where the expected one is a decimal it is compared with tolerance."""
    lines, wanted = ([line.split() for line in text.strip().split("\n")] for text in (found, expected))
    if [len(words) for words in lines] != [len(words) for words in wanted]:
        return False
    return all(map(_same_word, chain(*lines), chain(*wanted)))


def _same_word(found: str, expected: str) -> bool:
    """Python's own readers of numbers would take ``1_000``, ``١`` and ``sNaN``, and fractions are exact and finite."""
    if found == expected:
        return True
    if not all(len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word) for word in (found, expected)):
        return False
    number, wanted = Fraction(found), Fraction(expected)
    if number == wanted or expected.lstrip("+-").isdecimal():
        return number == wanted
    return abs(number - wanted) <= Fraction(TOLERANCE) * max(Fraction(1), abs(number), abs(wanted))
