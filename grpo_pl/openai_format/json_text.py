"""Reads JSON of a stranger; refuses too many elements or levels, which are counted in the raw bytes first."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_ELEMENTS = 1 << 17
"""Most commas, colons and opening brackets outside of strings: 8 MB of them would take gigabytes once parsed."""
MAX_DEPTH = 64
"""Most levels of nesting; requests to a worker are pickled, which fails at some hundreds of levels."""
MAX_DIGITS = 640
"""Most digits of an integer: a body may hold thousands, and converting one takes quadratic time."""


class MalformedJson(ValueError):
    """A text that is not the JSON that was asked for; ``code`` is that of OpenAI's errors."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message, self.code = message, code


def parse_object(body: bytes, *, name: str = "the body") -> dict[str, Any]:
    """The JSON object in a request's body, or in a text that errors call ``name``.

    Raises:
        MalformedJson: it is not a JSON object, or has too many elements, levels or digits.
    """
    check_outline(body, name)
    try:
        value = json.loads(body.decode(), parse_constant=_finite, parse_float=_finite, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise _invalid(f"{name} is not in UTF-8, see byte {error.start}.") from None
    except ValueError as error:
        raise _invalid(f"{name} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise _invalid(f"{name} must be a JSON object.")
    return value


def check_outline(body: bytes, name: str = "the body") -> None:
    """Refuses bodies with too many elements or levels, at the speed of ``bytes.replace``.

    Strings are recognised as by a JSON parser, up to the first error of a malformed body, at which a parser stops.

    Raises:
        MalformedJson: more than ``MAX_ELEMENTS`` elements or ``MAX_DEPTH`` levels, or unbalanced brackets.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_ELEMENTS:
        raise _too_many(name)
    outside = b"".join(bare.split(b'"')[::2])
    if sum(outside.count(sign) for sign in (b",", b":", b"[", b"{")) > MAX_ELEMENTS:
        raise _too_many(name)
    brackets = outside.translate(_ONE_KIND, delete=_NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each round removes the innermost level
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _invalid(f"{name} is not valid JSON: nested in more than {MAX_DEPTH} levels, or brackets that are open.")


_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _too_many(name: str) -> MalformedJson:
    return MalformedJson(f"{name} holds more than {MAX_ELEMENTS:,} values: send less at once.", "body_too_complex")


def _invalid(message: str) -> MalformedJson:
    return MalformedJson(message, "invalid_json")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite 64-bit number")
    return value


def _integer(text: str) -> int:
    if len(text.removeprefix("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(text)
