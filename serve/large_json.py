"""JSON of requests and answers, large ones beside the event loop, so that others are answered in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from grpo_pl.openai_format.json_text import MalformedJson, parse_object
from serve.errors import ApiError, from_fault, to_json

_LARGE = 1 << 14  # bytes from which reading a body would delay other requests noticeably
_HUGE = 1 << 18  # bytes from which bodies wait for one another
_MANY = 64  # items of a list that are encoded at once; no other thread runs meanwhile


class JsonRoute(APIRoute):
    """A route whose body is read by ``read_object``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        annotation: Any = Any if self.body_field is None else self.body_field.field_info.annotation
        kind = TypeAdapter[Any](annotation)

        async def handle_json(request: Request) -> Response:
            if request.method == "POST":
                require_json(request.scope)
            return await handle(_JsonRequest(request.scope, request.receive, kind))

        return handle_json


def require_json(scope: Scope) -> None:
    """Refuses content types that browsers send to other sites without a preflight (forms, text), and encoded bodies.

    Raises:
        ApiError: the body is not plain ``application/json`` (415).
    """
    headers = Headers(scope=scope)
    kinds = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
    if kinds != ["application/json"]:
        raise ApiError(415, "send the header `Content-Type: application/json`.", code="unsupported_media_type")
    if any(value.strip().lower() != "identity" for value in headers.getlist("content-encoding")):
        raise ApiError(415, "send the body as it is, without `Content-Encoding`.", code="unsupported_media_type")


_one_huge = asyncio.Semaphore(1)  # each thread that computes delays the event loop by a millisecond per turn


class _JsonRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, kind: TypeAdapter[Any]) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    async def json(self) -> Any:
        """The body as a JSON object for FastAPI to validate; a large one is validated already, in a thread."""
        body = await self.body()
        if len(body) < _LARGE:
            return read_object(body)
        async with _one_huge if len(body) >= _HUGE else nullcontext():
            return await asyncio.to_thread(self._validated, body)

    def _validated(self, body: bytes) -> Any:
        try:
            return self._kind.validate_python(read_object(body))
        except ValidationError as error:
            raise from_fault(error.errors()[0]) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: see ``parse_object`` (400).
    """
    try:
        return parse_object(body)
    except MalformedJson as error:
        raise ApiError(400, error.message, code=error.code) from None


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
