"""``WorkerSpec``: a LitSpec whose routes ask the worker of its LitAPI, with deadlines and cancelling."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

from fastapi import Request, Response
from litserve.specs.base import LitSpec
from litserve.utils import ResponseBufferItem
from pydantic import BaseModel

from serve.bodies import read_body
from serve.errors import ApiError, worker_lost
from serve.messages import Answer, Cancel, drained

log = logging.getLogger(__name__)

_APART_S, _MOST_APART_S = 0.0005, 0.008
"""Least time between two messages to a worker, for each open call and in all: one costs more than many requests."""


class QueueFull(ApiError):
    """Too many requests wait already (429)."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            429, f"the queue is full ({waiting} waiting); try again.", code="queue_full", headers={"Retry-After": "1"}
        )


class Deadline:
    """The time limit of a request, which starts when the object is made, and its error (504)."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self._seconds - self.spent()

    def passed(self) -> ApiError:
        message = f"not finished within {self._seconds:g} s: ask for less at once, or later."
        return ApiError(504, message, code="deadline_exceeded")


class Call:
    """A request to a worker."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.answer: Any = None
        self.failure: ApiError | None = None
        self.over = asyncio.Event()

    def end(self, failure: ApiError | None = None) -> None:
        """Marks the call as over, with the error for whoever waits for the answer, if any."""
        if not self.over.is_set():
            self.failure = failure
            self.over.set()

    async def result(self) -> Any:
        """Waits for the answer of a request that has one."""
        await self.over.wait()
        if self.failure is not None:
            raise self.failure
        return self.answer


C = TypeVar("C", bound=Call)
B = TypeVar("B", bound=BaseModel)
Handle = Callable[[B, Request], Coroutine[Any, Any, Response]]


class WorkerSpec(LitSpec):
    """The routes of a LitAPI, in the HTTP process. All answers of the worker come as messages of many requests, under
    one entry of LitServe's response buffer. ``api_path`` is the name of the worker's queue."""

    def __init__(self, api_path: str, *, deadline: float, max_queue: int) -> None:
        super().__init__()
        self.api_path, self.deadline, self.max_queue = api_path, deadline, max_queue
        self.calls: dict[int, Call] = {}
        self._uids = count()
        self._reader: asyncio.Task[None] | None = None
        self._outgoing: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self.is_alive = True
        """False once the worker is lost."""

    def __getstate__(self) -> dict[str, Any]:
        return {"api_path": self.api_path}  # all that the worker's copy is asked for

    @property
    def stream(self) -> bool:
        return True

    def add_route(self, path: str, kind: type[B], handle: Handle[B]) -> None:
        """Adds ``POST path``, whose JSON body is checked as ``kind``; errors are answered in the format of OpenAI's."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handle(await read_body(request, kind), request)
            except ApiError as error:
                return error.response()

        self.add_endpoint(path, endpoint, ["POST"])

    async def ask(self, payload: Any, *, deadline: Deadline) -> Any:
        """Sends ``payload`` and waits for the answer; cancelling it cancels the work.

        Raises:
            ApiError: the worker is lost (503), refuses (400) or fails (500), or the deadline has passed (504).
        """
        with self.registered(Call(next(self._uids)), deadline) as call:
            self.send(call.uid, payload)
            return await call.result()

    @contextmanager
    def registered(self, call: C, deadline: Deadline) -> Iterator[C]:
        """Hands answers to ``call`` while the context lasts, and cancels its work when it is left early.

        At its deadline a call ends also if nobody reads it: a client that stopped reading would keep slots.
        """
        if not self.is_alive:
            raise worker_lost()
        loop = asyncio.get_running_loop()
        if self._reader is None:
            self._reader = loop.create_task(self._read())
            threading.Thread(target=self._send, args=(loop,), name="requests", daemon=True).start()
        self.calls[call.uid] = call
        timer = loop.call_later(deadline.left(), lambda: self.end(call, deadline.passed()))
        try:
            yield call
        finally:
            timer.cancel()
            self.end(call)

    def end(self, call: Call, failure: ApiError | None = None) -> None:
        """Ends a call, with the error for who waits for it, and cancels what the worker still has of it."""
        if self.calls.pop(call.uid, None) is not None:
            self.send(call.uid, Cancel())
        call.end(failure)

    def lose(self) -> None:
        """The worker is lost: ends all calls with 503, and refuses later ones."""
        self.is_alive = False
        for call in list(self.calls.values()):
            self.end(call, worker_lost())

    def send(self, uid: int, payload: Any) -> None:
        """Sends a message of a call to the worker."""
        self._outgoing.put((uid, payload))

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: LitServe's queue answers each message, for which nobody should wait."""
        sent = 0.0
        while True:
            payloads = drained(self._outgoing)
            time.sleep(max(0.0, sent + min(_APART_S * len(self.calls), _MOST_APART_S) - time.monotonic()))
            payloads += drained(self._outgoing, wait=False)
            sent = time.monotonic()
            try:
                self.request_queue.put((self.response_queue_id, "", sent, payloads))
            except (EOFError, OSError):  # the process that holds LitServe's queues is gone
                loop.call_soon_threadsafe(self.lose)
                return

    def handle(self, message: Any) -> None:
        """Takes one message of the worker."""
        if (call := self.calls.pop(message.uid, None)) is None:
            return  # cancelled meanwhile
        if isinstance(message, Answer):
            call.answer = message.data
            call.end()
        else:
            call.end(ApiError(message.status, message.message, param=message.param, code=message.code))

    async def _read(self) -> None:
        buffer = ResponseBufferItem(asyncio.Event(), response_queue=deque())
        self.response_buffer[self.api_path] = buffer
        async for messages in self.data_streamer(buffer.response_queue, buffer.event):
            for message in messages:
                try:
                    self.handle(message)
                except Exception:  # a fault in the answer to one request must not end all others
                    log.exception("an answer of the worker could not be read")
