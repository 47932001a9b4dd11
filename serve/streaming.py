"""Sends answers as server-sent events, and works on a request only while its client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from serve.errors import ApiError

T = TypeVar("T")
_PATIENCE_S = 30.0  # for a client that does not read its stream


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` and cancels it if the client disconnects (499, which nobody reads). The request's body must have
    been read."""
    task, gone, over = asyncio.current_task(), False, False
    assert task is not None

    def hang_up(_: object) -> None:
        nonlocal gone
        if not over:
            gone = True
            task.cancel()

    watch = asyncio.ensure_future(request.receive())
    watch.add_done_callback(hang_up)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ApiError(499, "the client hung up.", code="client_closed_request") from None
    finally:
        over = True
        watch.cancel()


class EventStream(Response):
    """Sends server-sent events as ``events`` yields them; an ``ApiError`` before the first event is a usual answer.
    HTTP/1.0 has no chunks: such a client gets all events at the end, with their length."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._events, self._started = request, events, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await while_connected(self._request, self._send(send))
        except ApiError as error:
            if not self._started:
                await error.response()(scope, receive, send)
        except TimeoutError:
            return  # the connection is closed

    async def _send(self, send: Send) -> None:
        if self._request.scope["http_version"] == "1.0":
            whole = "".join([events async for events in self._events])
            self._started = True
            answer = Response(whole, headers={"Cache-Control": "no-cache"}, media_type=self.media_type)
            await answer(self._request.scope, self._request.receive, send)
            return
        async for events in self._events:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with asyncio.timeout(_PATIENCE_S):
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
