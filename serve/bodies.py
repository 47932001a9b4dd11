"""Reads JSON bodies of requests and writes large answers, in threads, so that others are answered meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from grpo_pl.openai_format.fields import field_fault
from grpo_pl.openai_format.json_text import MalformedJson, parse_object
from serve.errors import ApiError, to_json

_LARGE = 1 << 14  # bytes from which reading a body would delay other requests noticeably
_HUGE = 1 << 18  # bytes from which bodies wait for one another, to bound the memory that they take
_BODY_S = 30.0
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

_one_huge = asyncio.Semaphore(1)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of a process: after a fork those of its parent are gone. asyncio's own are for LitServe, which reads
    answers there."""
    return ThreadPoolExecutor(4, thread_name_prefix="work")


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """The result of a call that takes long, in a thread."""
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), partial(call, *arguments))


async def read_body(request: Request, kind: type[B]) -> B:
    """The body of a request as ``kind``; else 415, 408, 413 or 400."""
    # forms and texts, which browsers send to other sites without a preflight, and encoded bodies
    kinds = [value.partition(";")[0].strip().lower() for value in request.headers.getlist("content-type")]
    if kinds != ["application/json"]:
        raise ApiError(415, "send the header `Content-Type: application/json`.", code="unsupported_media_type")
    if any(value.strip().lower() != "identity" for value in request.headers.getlist("content-encoding")):
        raise ApiError(415, "send the body as it is, without `Content-Encoding`.", code="unsupported_media_type")
    try:
        async with asyncio.timeout(_BODY_S):
            body = await request.body()
    except TimeoutError:
        message, close = f"the body did not arrive within {_BODY_S:g} s.", {"Connection": "close"}
        raise ApiError(408, message, code="body_timeout", headers=close) from None
    except ClientDisconnect:
        raise ApiError(499, "the client hung up.", code="client_closed_request") from None
    if not body and "upgrade" in request.headers:  # behind which uvicorn's default parser reads no body
        message = "send it without `Upgrade`, as HTTP/1.1 (in Java HTTP_1_1), or start the server with --http h11."
        raise ApiError(400, message, code="upgrade_not_supported")
    if len(body) < _LARGE:
        return parsed(kind, body)
    async with _one_huge if len(body) >= _HUGE else nullcontext():
        return await in_thread(parsed, kind, body)


def parsed(kind: type[B], body: bytes) -> B:
    """The object in a body; else 400, with the first fault."""
    try:
        return kind.model_validate(parse_object(body))
    except MalformedJson as error:
        raise ApiError(400, error.message, code=error.code) from None
    except ValidationError as error:
        message, param, code = field_fault(error.errors(include_url=False, include_input=False)[0])
        raise ApiError(400, message, param=param, code=code) from None


async def large_json_response(make: Callable[[], dict[str, Any]]) -> Response:
    """The response for ``make()``, which may be large; both are made in a thread, and the elements of lists one by one,
    because no other thread runs while the encoder does."""
    return await in_thread(lambda: Response("".join(_pieces(make())), media_type="application/json"))


def _pieces(value: dict[str, Any]) -> Iterator[str]:
    for i, (name, each) in enumerate(value.items()):
        yield f"{',' if i else '{'}{to_json(name)}:"
        if isinstance(each, list):
            for j, element in enumerate(each):
                yield f"{',' if j else '['}{to_json(element)}"
            yield "]" if each else "[]"
        else:
            yield to_json(each)
    yield "}"
