"""Doing work for a client only as long as it is there, and several streams of answers as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

from serve.errors import ApiError

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up. The body must have been read.

    Raises:
        ApiError: the client is gone; nobody will see it.
    """
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client hung up.", code="client_closed_request")
        return task.result()
    finally:
        hang_up.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come; the first failure ends them all."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    items: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    async def forward(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait(item)
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

    tasks = [asyncio.ensure_future(forward(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            got = await items.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                open_streams -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
