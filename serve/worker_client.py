"""``WorkerClient``: the front process's side of the connection to a worker, with deadlines and cancelling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, TypeVar

from serve.errors import ApiError
from serve.worker_channel import Answer, Cancel, Frames, InvalidRequest, packed

_SLICE_S = 0.004
"""Seconds for which messages of a worker are handled before the event loop does other work."""
_NO_CALL = -1  # in place of a call's number


class Deadline:
    """The time limit of a request, which starts when the object is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self._seconds - self.spent()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Context manager that cancels its body when the time is up.

        Raises:
            ApiError: the time is up (504).
        """
        try:
            async with asyncio.timeout(self.left()):
                yield
        except TimeoutError:
            raise self.passed() from None

    def passed(self) -> ApiError:
        message = f"not finished within {self._seconds:g} s: ask for less at once, or later."
        return ApiError(504, message, code="deadline_exceeded")


class Call:
    """A request to a worker.

    Args:
        on_end: called when the worker is done with the request.
    """

    def __init__(self, uid: int, *, on_end: Callable[[], None] = lambda: None) -> None:
        self.uid, self.on_end = uid, on_end
        self.answer: Any = None
        self._ended = False
        self._failure: ApiError | None = None
        self._news = asyncio.Event()

    def end(self, failure: ApiError | None = None) -> None:
        """Marks the call as ended, with the error for whoever waits for the answer, if any."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._news.set()

    async def result(self) -> Any:
        """Waits for the answer of a request that has one."""
        await self._news.wait()
        if self._failure is not None:
            raise self._failure
        return self.answer


C = TypeVar("C", bound=Call)


class WorkerClient(asyncio.Protocol):
    """The connection to one worker process, through which routes send requests and read answers."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self._uids, self._frames = count(), Frames()
        self._lost: Callable[[], ApiError] | None = None  # makes the error for all calls once no more answers will come

    async def ask(self, payload: Any, *, deadline: Deadline, on_end: Callable[[], None] = lambda: None) -> Any:
        """Sends ``payload`` and waits for the answer; cancelling it cancels the work.

        Raises:
            ApiError: the worker is lost or the server is ending (503), the worker refuses (400) or fails (500), or the
                deadline has passed (504).
        """
        with self._registered(Call(next(self._uids), on_end=on_end), deadline) as call:
            self._send(call.uid, payload)
            return await call.result()

    def notify(self, message: Any) -> None:
        """Sends a message that the worker does not answer."""
        self._send(_NO_CALL, message)

    def fail_all(self, reason: Callable[[], ApiError]) -> None:
        """Ends all calls with ``reason()`` as their error, and refuses later ones with it."""
        self._lost = reason
        for call in list(self.calls.values()):
            self._forget(call)
            call.end(reason())

    @contextmanager
    def _registered(self, call: C, deadline: Deadline) -> Iterator[C]:
        """Hands answers to ``call`` while the context lasts, and cancels its work when it is left early.

        At its deadline a call ends also if nobody reads it: a client that stopped reading would keep slots.
        """
        if self._lost is not None:
            call.on_end()
            raise self._lost()
        self.calls[call.uid] = call
        timer = asyncio.get_running_loop().call_later(deadline.left(), lambda: self._fail(call, deadline.passed()))
        try:
            yield call
        finally:
            timer.cancel()
            self._cancel(call)

    def _fail(self, call: Call, error: ApiError) -> None:
        self._cancel(call)
        call.end(error)

    def _cancel(self, call: Call) -> None:
        if call.uid in self.calls:
            self._send(call.uid, Cancel())  # before its slots are given to others
            self._forget(call)

    def _forget(self, call: Call) -> None:
        """Removes a call that the worker is done with and calls its ``on_end``."""
        del self.calls[call.uid]
        call.on_end()

    def _send(self, uid: int, payload: Any) -> None:
        if self._lost is None:
            self._transport.write(packed((uid, payload)))

    # --- messages of the worker -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        until = time.monotonic() + _SLICE_S
        for message in self._frames.feed(data):
            self._handle(message)
            if time.monotonic() > until:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._read_on)
                break

    def _read_on(self) -> None:
        """Handles the messages that were left, one more turn of the event loop later."""
        self._transport.resume_reading()
        self.data_received(b"")

    def _handle(self, message: Any) -> None:
        if (call := self.calls.get(message.uid)) is None:
            return  # cancelled meanwhile
        self._forget(call)
        if isinstance(message, Answer):
            call.answer = message.data
            call.end()
        elif isinstance(reason := message.reason, InvalidRequest):
            call.end(ApiError(400, reason.message, param=reason.param, code=reason.code))
        else:
            call.end(ApiError(500, reason, code="worker_error"))
