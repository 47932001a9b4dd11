"""Runs rewards that wait for I/O at the same time: a thread for each, and one event loop per process for coroutines."""

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
    """Runs ``coroutine`` and returns its result; may be called from any thread, also from one that runs an event loop.

    All coroutines of a process share one loop, so that what they keep between calls, such as the connections of a
    client, stays usable. If the caller is interrupted while it waits, the coroutine is cancelled.

    Raises:
        RuntimeError: the coroutine called ``sys.exit``.
        Exception: whatever the coroutine raises.
    """
    coroutine = _without_exit(coroutine)
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


async def _without_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    """``coroutine``, with an error in place of ``SystemExit``, which would end the loop that others wait for."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Runs ``call`` in a daemon thread, with a copy of the caller's context variables; the future gets its outcome."""
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
    """The results of ``calls``, in order.

    Args:
        calls: pairs (waits, call). Calls with ``waits`` run in threads of their own, all at the same time; the others
            run meanwhile in this thread, one after another.

    Raises:
        Exception: whatever a call raises.
    """
    started = {i: in_thread(call) for i, (waits, call) in enumerate(calls) if waits and len(calls) > 1}
    here = {i: call() for i, (_, call) in enumerate(calls) if i not in started}
    return [started[i].result() if i in started else here[i] for i in range(len(calls))]


_starting = threading.Lock()


@cache
def _start_loop(process: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="async rewards", daemon=True)
    thread.start()
    return loop, thread
