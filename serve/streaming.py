"""Sends answers as server-sent events, and works on a request only while its client is connected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from serve.errors import ApiError

T = TypeVar("T")
R = TypeVar("R")
_SLICE_S = 0.004


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` and cancels it if the client disconnects. The request's body must have been read.

    Raises:
        ApiError: the client has disconnected (499), so the error reaches only the log.
    """
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
    """Sends server-sent events as ``events`` yields them; an ``ApiError`` before the first event is raised."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request, self._events, self._started = request, events, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await while_connected(self._request, self._send(send))
        except ApiError:
            if not self._started:
                raise

    async def _send(self, send: Send) -> None:
        async for events in self._events:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class TimeSlices:
    """Shares the event loop: all requests together work for a few milliseconds at a time, one after the other, and
    whatever else there is runs in between, however many have work for it at once."""

    def __init__(self) -> None:
        self._lock, self._until = asyncio.Lock(), 0.0

    async def map(self, handle: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results of ``handle`` for all items."""
        results: list[R] = []
        left = iter(items)
        while True:
            async with self._lock:
                if time.monotonic() > self._until:
                    await asyncio.sleep(0)  # with the lock, or all requests would have a slice in one turn of the loop
                    self._until = time.monotonic() + _SLICE_S
                for item in left:
                    results.append(handle(item))
                    if time.monotonic() > self._until:
                        break
                else:
                    return results


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all streams as they arrive; the first failure closes all streams and is raised."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
