"""Reads JSON bodies; refuses other types, and too many elements or levels, which are counted in the raw bytes first."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from serve.errors import ApiError, from_fault

MAX_ELEMENTS = 1 << 17
"""Most commas, colons and opening brackets outside of strings: 8 MB of them would take gigabytes once parsed."""
MAX_DEPTH = 64
"""Most levels of nesting; requests to a worker are pickled, which fails at some hundreds of levels."""
MAX_DIGITS = 640
"""Most digits of an integer: a body may hold thousands, and converting one takes quadratic time."""
_LARGE = 1 << 14  # bytes from which reading a body would delay other requests noticeably
_HUGE = 1 << 18  # bytes from which bodies wait for one another


class JsonRoute(APIRoute):
    """A route whose body is read by ``parse_object``."""

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
            return parse_object(body)
        async with _one_huge if len(body) >= _HUGE else nullcontext():
            return await asyncio.to_thread(self._validated, body)

    def _validated(self, body: bytes) -> Any:
        try:
            return self._kind.validate_python(parse_object(body))
        except ValidationError as error:
            raise from_fault(error.errors()[0]) from None


def parse_object(body: bytes, *, name: str = "the body") -> dict[str, Any]:
    """The JSON object in a request's body, or in a text that errors call ``name``.

    Raises:
        ApiError: it is not a JSON object, or has too many elements, levels or digits (400).
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
        ApiError: more than ``MAX_ELEMENTS`` elements or ``MAX_DEPTH`` levels, or unbalanced brackets (400).
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


def _too_many(name: str) -> ApiError:
    return ApiError(400, f"{name} holds more than {MAX_ELEMENTS:,} values: send less at once.", code="body_too_complex")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite 64-bit number")
    return value


def _integer(text: str) -> int:
    if len(text.removeprefix("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(text)
