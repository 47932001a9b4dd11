"""Rewards that wait for something outside, run beside each other: one event loop a process, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of ``coroutine``, from any thread and also where an event loop already runs in this one.

    All coroutines of a process share one loop, so that what they keep between calls, such as the connections of a
    client, lives on.
    """
    with _starting:
        loop, thread = _start_loop(os.getpid())  # a forked process has none of its parent's threads
    if threading.current_thread() is thread:  # called by a coroutine of ours: the loop cannot wait for itself
        return in_thread(lambda: asyncio.run(coroutine)).result()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Starts ``call`` in a thread that does not keep the process alive."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


def call_together(calls: Sequence[tuple[bool, Callable[[], T]]]) -> list[T]:
    """The results of ``calls``, in order: those marked as waiting run beside each other and beside the others, which
    run one after the other in this thread."""
    started = [in_thread(call) if waits and len(calls) > 1 else None for waits, call in calls]
    here = [call() if future is None else None for future, (_, call) in zip(started, calls, strict=True)]
    return [
        result if future is None else future.result()  # type: ignore[misc]
        for future, result in zip(started, here, strict=True)
    ]


_starting = threading.Lock()


@cache
def _start_loop(process: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="async rewards", daemon=True)
    thread.start()
    return loop, thread
