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
    loop = _loop(os.getpid())  # a forked process has none of its parent's threads
    if _running_loop() is loop:  # called by a coroutine of ours: the loop cannot wait for itself
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
    together = sum(waits for waits, _ in calls) > 0 and len(calls) > 1
    started = [in_thread(call) if waits and together else None for waits, call in calls]
    here = [call() if future is None else None for future, (_, call) in zip(started, calls, strict=True)]
    return [
        result if future is None else future.result()  # type: ignore[misc]
        for future, result in zip(started, here, strict=True)
    ]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_starting = threading.Lock()


def _loop(process: int) -> asyncio.AbstractEventLoop:
    with _starting:
        return _start_loop(process)


@cache
def _start_loop(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop
