"""uvicorn's HTTP protocol with RFC 9112's checks of requests, and limits on connections, headers and unread answers."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import ssl
from contextlib import suppress
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serve.errors import ApiError, shutting_down

HEAD_SECONDS = 10.0
"""Most seconds from the connection, or from the first byte of a later request, to the end of its headers."""
HEAD_BYTES = 1 << 16
"""Most bytes of request line and headers."""
FRAMING_BYTES = 1 << 13
"""Most bytes around a chunked body (sizes, extensions, trailers) beyond what its chunks warrant, which are `_PER_CHUNK`
for each and as many as it holds."""
WRITE_SECONDS = 30.0
"""Most seconds for which a client may leave an answer unread; then the connection is closed."""
ACCEPTED_AT_ONCE = 16
"""Connections accepted per turn of the event loop; others are closed only in the next turn, so that there must be file
descriptors for all of these."""
_PER_CHUNK = 32  # a size of 16 digits, two line ends, and some more
_PIECE = 1 << 12  # bytes given to the parser at once: what is around a body is counted to this precision
_PIPELINED = 8  # most requests that a client may send before it has their answers
_MOST_CONNECTIONS = 1024
_SPARE_DESCRIPTORS = 4 * ACCEPTED_AT_ONCE


def connection_limit() -> int:
    """Most connections: as many as this process has file descriptors for, less a reserve, and at most 1024."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    used = len(os.listdir("/dev/fd"))
    return max(1, min(_MOST_CONNECTIONS, allowed - used - _SPARE_DESCRIPTORS))


class ConnectionLimit:
    """Limits the open connections of a server; at the limit a new one replaces the one with the longest idle client."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[BoundedProtocol] = set()
        self._refusing = False
        self._waiting: dict[BoundedProtocol, None] = {}  # connections that wait for their client, longest first

    def opened(self, protocol: BoundedProtocol) -> ApiError | None:
        """Adds an open connection, if need be by closing another; returns the error if there is no room.

        One with TLS is added before its handshake, and once more after it.
        """
        self.closed(protocol)
        if self._refusing:
            return shutting_down()
        if len(self._open) >= self.limit:
            longest = next(iter(self._waiting), None)
            if longest is None:
                message = "every connection of this server is busy; try again shortly."
                return ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
            longest.transport.abort()
            self.closed(longest)
        self._open.add(protocol)
        self._waiting[protocol] = None
        return None

    def closed(self, protocol: BoundedProtocol) -> None:
        self._open.discard(protocol)
        self._waiting.pop(protocol, None)

    def request_received(self, protocol: BoundedProtocol) -> None:
        """A whole request has arrived: the connection waits for the server."""
        self._waiting.pop(protocol, None)

    def body_received(self, protocol: BoundedProtocol) -> None:
        """A piece of a body has arrived: of those who wait for their client it is the last to be replaced."""
        if self._waiting.pop(protocol, self) is None:
            self._waiting[protocol] = None

    def request_answered(self, protocol: BoundedProtocol) -> None:
        """All requests are answered: the connection waits for its client."""
        if protocol in self._open:
            self._waiting[protocol] = None

    def close(self) -> None:
        """Refuses new connections, and closes those that wait for their client."""
        self._refusing = True
        for protocol in list(self._waiting):
            protocol.transport.abort()


class Handshake(asyncio.Protocol):
    """A connection in its TLS handshake, which waits for its client like any other; then `BoundedProtocol` goes on.

    With a certificate of its own, a server of the event loop would tell of a connection only after its handshake, so
    that those without one could neither be counted nor closed.
    """

    def __init__(self, *, limit: ConnectionLimit, context: ssl.SSLContext, **options: Any) -> None:
        self._http, self._limit, self._context = BoundedProtocol(limit=limit, **options), limit, context

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        transport.abort()  # reads nothing and closes its own descriptor, not the connection
        if self._limit.opened(self._http) is not None:
            self._socket.close()
            return
        self._http.transport = self  # type: ignore[assignment]  # until there is one
        self._task = self._http.loop.create_task(self._shake())

    async def _shake(self) -> None:
        try:
            await self._http.loop.connect_accepted_socket(
                lambda: self._http, self._socket, ssl=self._context, ssl_handshake_timeout=HEAD_SECONDS
            )
        except OSError:  # no TLS, too late, or gone
            self._limit.closed(self._http)

    def abort(self) -> None:
        with suppress(OSError):  # it may be gone
            self._socket.shutdown(socket.SHUT_RDWR)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Errors below the routes have the same JSON format as theirs."""

    def __init__(self, *args: Any, limit: ConnectionLimit, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = limit
        self._head_timer: asyncio.TimerHandle | None = None  # runs until the headers are complete
        self._write_timer: asyncio.TimerHandle | None = None
        self._framing = 0  # bytes of the head, or those around the body
        self._in_message = self._in_body = False
        self._fault: ApiError | None = None  # found in the message that the parser reads
        self._refusal: ApiError | None = None  # sent once the requests before it are answered

    # --- asyncio's hooks --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        refusal = self._limit.opened(self)
        if refusal is None:
            self._await_head()
        else:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._limit.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while rest and self._refusal is None and not self.transport.is_closing():
            piece, rest = rest[:_PIECE], rest[_PIECE:]
            self._framing += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                # the parser leaves out the body after an offer to change the protocol, which is ignored here (RFC 9110,
                # 7.8): another one reads the request without the offer
                rest = memoryview(b"".join([self._head_without_offer(), piece[offer.args[0] :], rest]))
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self._framing = 0
            except httptools.HttpParserError as error:
                is_http2 = self.parser.get_method() == b"PRI"
                self._refuse(self._fault or (_wrong_version() if is_http2 else _invalid(str(error))))
            else:
                if self._head_timer is not None and self._framing > HEAD_BYTES:
                    self._refuse(_head_too_large())
                elif self._head_timer is None and self._in_body and self._framing > FRAMING_BYTES:
                    self._refuse(_invalid("the sizes, extensions or trailers around its chunks are too long"))
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._head_timer is None and not self._in_message and self.timeout_keep_alive_task is None and self._idle:
            self._await_head()  # blank lines stop the timer of an idle connection and begin no request

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
        if self._offers_another_protocol:
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._fault = self._checked_head()
        if self._fault is not None:
            raise ValueError(self._fault.message)  # ends the parser
        self._framing = 0
        super().on_headers_complete()
        self._in_body = True
        if len(self.pipeline) > _PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests ahead of their answers")

    def on_chunk_header(self) -> None:
        self._framing = max(0, self._framing - _PER_CHUNK)

    def on_body(self, body: bytes) -> None:
        self._framing = max(0, self._framing - 2 * len(body))
        self._limit.body_received(self)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_another_protocol:
            return
        super().on_message_complete()
        self._in_message = self._in_body = False
        self._framing = 0
        if not self._idle:
            self._limit.request_received(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._idle:
            return
        if self._refusal is not None and not self.transport.is_closing():
            self._write(self._refusal)
        self._limit.request_answered(self)

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _offers_another_protocol(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        """The head that was read, without its ``Upgrade``."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _checked_head(self) -> ApiError | None:
        """Refuses heads that other programs could read in another way, and makes a whole URL a path and a `Host`."""
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            return _head_too_large()
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return _wrong_version()
        if self.parser.get_method() == b"CONNECT":
            return _invalid("this server is no proxy")
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding").lower().split(b",")
        if codings != [b""] and version == "1.0":
            return _invalid("HTTP/1.0 has no `Transfer-Encoding`")
        if codings != [b""] and codings[-1].strip() != b"chunked":
            return _invalid("the last `Transfer-Encoding` must be `chunked`")
        if len(codings) > 1:
            message = (
                "send the body with `Transfer-Encoding: chunked` or with `Content-Length`; no other coding is read."
            )
            return ApiError(501, message, code="unsupported_transfer_encoding")
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        return self._checked_target(version)

    def _checked_target(self, version: str) -> ApiError | None:
        """Takes the host of a whole URL for that of `Host` (RFC 9112, 3.2.2), which routes and checks read."""
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            return _invalid("its target is no valid URL")
        if target.host is None:
            return None
        if target.schema.lower() not in (b"http", b"https") or target.userinfo is not None:
            return _invalid("its target is no URL of this server")
        host = b"[%s]" % target.host if b":" in target.host else target.host
        host += b"" if target.port is None else b":%d" % target.port
        given = [i for i, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(given) == 1:
            self.headers[given[0]] = (b"host", host)
        elif not given and version == "1.0":
            self.headers.append((b"host", host))
        self.url = (target.path or b"/") + (b"" if target.query is None else b"?" + target.query)
        return None

    def _await_head(self) -> None:
        self._framing = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._in_message:
            message = f"the request's headers did not arrive within {HEAD_SECONDS:g} s."
            self._refuse(ApiError(408, message, code="head_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers the message that the parser reads with ``error``, once it is its turn, and closes the connection."""
        if self.transport.is_closing():
            return
        self._refusal = error
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if not self._in_body:
            if self._idle:
                self._write(error)  # else `on_response_complete` does
        elif self.pipeline:
            cycle, _ = self.pipeline.popleft()
            cycle.keep_alive = False
            self.pipeline.appendleft((cycle, error.response()))  # type: ignore[arg-type]  # Starlette's types of the same
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self.cycle.disconnected = True  # its answer is this one
            self._write(error)

    def _write(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in {**headers, **(error.headers or {})}.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()


def _head_too_large() -> ApiError:
    return ApiError(431, f"request line and headers are larger than {HEAD_BYTES >> 10} KiB.", code="head_too_large")


def _wrong_version() -> ApiError:
    return ApiError(505, "this server speaks HTTP/1.1 and HTTP/1.0.", code="http_version_not_supported")


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"this is not a valid HTTP request: {why}.", code="invalid_http")
