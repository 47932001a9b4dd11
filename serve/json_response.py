"""Writes answers as JSON; large ones in a thread and piece by piece, so that others are answered in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Response

_MANY = 64  # items of a list that are encoded at once; no other thread runs meanwhile

to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # `json.dumps` makes one at each call


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as a JSON response in ASCII, so that texts with lone surrogates are valid JSON as well."""
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


async def large_json_response(make: Callable[[], Any]) -> Response:
    """The response for ``make()``, which may be large; both are made in a thread, and the text piece by piece, because
    other requests are answered only between pieces."""

    return await asyncio.to_thread(lambda: Response(encoded(make()), media_type="application/json"))


class Encoded(NamedTuple):
    """A part of an answer that is JSON already, in pieces."""

    pieces: Sequence[str]


def encoded(value: Any) -> str:
    """The JSON of a value that may hold :class:`Encoded` parts."""
    pieces: list[str] = []
    _encode(value, pieces)
    return "".join(pieces)


def _encode(value: Any, pieces: list[str]) -> None:
    """Adds the JSON of a value to ``pieces``, in pieces that the encoder makes in about a millisecond."""
    if isinstance(value, Encoded):
        pieces += value.pieces
    elif not _is_large(value):
        pieces.append(to_json(value))
    elif isinstance(value, dict):
        for i, (name, each) in enumerate(value.items()):
            pieces.append(f"{',' if i else '{'}{to_json(name)}:")
            _encode(each, pieces)
        pieces.append("}")
    else:
        pieces.append("[")
        for first in range(0, len(value), _MANY):
            some = value[first : first + _MANY]
            pieces.append("," if first else "")
            if not any(map(_is_large, some)):
                pieces.append(to_json(some)[1:-1])
                continue
            for i, each in enumerate(some):
                pieces.append("," if i else "")
                _encode(each, pieces)
        pieces.append("]")


def _is_large(value: Any) -> bool:
    """True for a value that holds a list of many items, or what is JSON already."""
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    if isinstance(value, list):
        return len(value) > _MANY or any(map(_is_large, value))
    return isinstance(value, Encoded)
