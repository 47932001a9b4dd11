"""uvicorn's HTTP protocol with limits on connections, headers and unread answers."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from typing import Any
from weakref import WeakSet

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serve.errors import ApiError, shutting_down

HEAD_SECONDS = 10.0
"""Most seconds from the connection, or from the first byte of a later request, to the end of its headers."""
HEAD_BYTES = 1 << 16
"""Most bytes of request line and headers."""
WRITE_SECONDS = 30.0
"""Most seconds for which a client may leave an answer unread; then the connection is closed."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted per turn of the event loop; others are closed only in the next turn, so that there must be file
descriptors for all of these."""
_PIPELINED = 8  # most requests that a client may send before it has their answers
_MOST_CONNECTIONS = 1024
_SPARE_DESCRIPTORS = 4 * ACCEPTED_AT_ONCE


def connection_limit() -> int:
    """Most connections: as many as this process has file descriptors for, less a reserve, and at most 1024."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/dev/fd"))
    return max(1, min(_MOST_CONNECTIONS, allowed - used - _SPARE_DESCRIPTORS))


class Crowd:
    """The connections of a server. When all are taken, a new one replaces that whose client has been idle longest."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._opening: WeakSet[BoundedProtocol] = WeakSet()  # in a TLS handshake
        self._open: set[BoundedProtocol] = set()
        self._closed = False
        self._waiting: dict[BoundedProtocol, None] = {}  # connections that wait for their client, longest first

    def knock(self, protocol: BoundedProtocol) -> None:
        """Registers a connection that is accepted but not open yet, as in a TLS handshake.

        Raises:
            ConnectionRefusedError: too many connections are not open yet; the event loop closes the socket.
        """
        if len(self._opening) >= max(self.limit // 2, 2 * ACCEPTED_AT_ONCE):
            raise ConnectionRefusedError("too many connections that are not open yet")
        self._opening.add(protocol)

    def enter(self, protocol: BoundedProtocol) -> ApiError | None:
        """Adds an open connection, if need be by closing another; returns the error if there is no room."""
        self._opening.discard(protocol)
        if self._closed:
            return shutting_down()
        if len(self._open) >= self.limit:
            longest = next(iter(self._waiting), None)
            if longest is None:
                message = "every connection of this server is busy; try again shortly."
                return ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
            longest.transport.abort()
            self.leave(longest)
        self._open.add(protocol)
        self._waiting[protocol] = None
        return None

    def leave(self, protocol: BoundedProtocol) -> None:
        self._open.discard(protocol)
        self._waiting.pop(protocol, None)

    def has_sent(self, protocol: BoundedProtocol) -> None:
        """A whole request has arrived: the connection waits for the server."""
        self._waiting.pop(protocol, None)

    def is_sending(self, protocol: BoundedProtocol) -> None:
        """A piece of a body has arrived: of those who wait for their client it is the last to be replaced."""
        if self._waiting.pop(protocol, self) is None:
            self._waiting[protocol] = None

    def was_answered(self, protocol: BoundedProtocol) -> None:
        """All requests are answered: the connection waits for its client."""
        if protocol in self._open:
            self._waiting[protocol] = None

    def close(self) -> None:
        """Refuses new connections, and closes those that wait for their client."""
        self._closed = True
        for protocol in list(self._waiting):
            protocol.transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Errors below the routes have the same JSON format as theirs."""

    def __init__(self, *args: Any, crowd: Crowd, **options: Any) -> None:
        super().__init__(*args, **options)
        self._crowd = crowd
        self._head_timer: asyncio.TimerHandle | None = None  # runs until the headers are complete
        self._write_timer: asyncio.TimerHandle | None = None
        self._overhead = 0  # bytes since the last request, head or piece of a body
        self._in_message = False
        self._fault: ApiError | None = None
        crowd.knock(self)

    # --- asyncio's hooks --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        refusal = self._crowd.enter(self)
        if refusal is None:
            self._await_head()
        else:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._overhead += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_timer is None and not self._in_message and self.timeout_keep_alive_task is None and self._idle:
            self._await_head()  # blank lines stop the timer of an idle connection and begin no request
        elif self._overhead > HEAD_BYTES:
            if self._head_timer is None:  # chunk sizes, or headers after the body
                self.transport.abort()
            else:
                self._refuse(_head_too_large())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    # --- the parser's hooks -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        if self._head_timer is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # else it comes after the body and could change checked headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            self._fault = _head_too_large()
            raise ValueError(self._fault.message)  # ends the parser, which comes back through `send_400_response`
        super().on_headers_complete()
        if len(self.pipeline) > _PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests ahead of their answers")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        self._crowd.is_sending(self)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message, self._overhead = False, 0
        if not self._idle:
            self._crowd.has_sent(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self._crowd.was_answered(self)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(self._fault or ApiError(400, "this is not an HTTP request.", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a request for an upgrade is answered like any other."""

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._overhead = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._in_message:
            message = f"the request's headers did not arrive within {HEAD_SECONDS:g} s."
            self._refuse(ApiError(408, message, code="head_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **(error.headers or {})}.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()


def _head_too_large() -> ApiError:
    return ApiError(431, f"request line and headers are larger than {HEAD_BYTES >> 10} KiB.", code="head_too_large")
