"""``Guard``: the ASGI layer around all routes that checks the key, the sender and the size of each request."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError
from serve.login import LOGIN, LOGIN_BYTES, Sessions, login_page
from serve.logs import log_request
from serve.origins import Origins
from serve.settings import ServeSettings
from serve.weights import WEIGHTS

_OPEN = frozenset({"/health"})
_BODY_SECONDS = 30.0
_SMALL_BODY = 1 << 16
_LARGE_BODIES = 8  # of the largest size, or as many bytes in smaller ones, are in hand at once
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_CLIENT_GONE = 499

_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""Headers of every answer that does not set them itself."""

ObserveFn = Callable[[str, int, float], None]
"""Called as ``observe(route, status, seconds)`` after every request; ``other`` stands for all paths without a route."""


class Guard:
    """Wraps the application, whatever its routes do.

    Args:
        port: the port that the server listens on.
        observe: called after every request.
    """

    def __init__(self, app: ASGIApp, *, settings: ServeSettings, port: int, observe: ObserveFn) -> None:
        self._app, self._origins, self._observe = app, Origins(settings), observe
        self._weights_key = None if settings.weights_key is None else settings.weights_key.encode()
        self._sessions = None if settings.api_key is None else Sessions(settings.api_key.encode(), port)
        self._max_body = settings.max_body_mb << 20
        self._bytes_left = _LARGE_BODIES * self._max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), _CLIENT_GONE
        request_id, method = _request_id(scope), scope["method"]
        expects, body_asked = "expect" in Headers(scope=scope), False
        if method == "HEAD":  # answered as GET; the HTTP layer leaves the body out
            scope = {**scope, "method": "GET"}

        async def asking() -> Message:
            nonlocal body_asked
            body_asked = True
            return await receive()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if expects and not body_asked:  # whether the client sends its body all the same is not known
                    headers["connection"] = "close"
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._answer(scope, asking, watched)
        finally:
            seconds = time.monotonic() - began
            self._observe(getattr(scope.get("route"), "path", "other"), status, seconds)
            log_request(
                request_id=request_id,
                client=(scope.get("client") or ("",))[0],
                method=method,
                path=scope["path"],
                status=status,
                seconds=round(seconds, 4),
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = [0]
        try:
            logs_in = self._sessions is not None and (scope["method"], scope["path"]) == ("POST", LOGIN)
            limit = LOGIN_BYTES if logs_in else self._max_body
            _check_size(scope, limit)
            if not logs_in:
                self._check_key(scope)
            body = _LazyBody(lambda: self._read(scope, receive, limit, held), receive)
            if "expect" not in Headers(scope=scope):  # the client may not listen before it has sent its body
                await body.read()
            if scope["path"] not in _OPEN:
                self._origins.check(scope)
            if self._sessions is not None and logs_in:
                key = await body.read()
                await self._sessions.open(key, secure=scope["scheme"] == "https")(scope, receive, send)
                return
            await self._app(scope, body.receive, send)
        except ApiError as error:
            page = error.status == 401 and _wants_page(scope)
            await (login_page() if page else error.response())(scope, receive, send)
        finally:
            self._bytes_left += held[0]

    def _check_key(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if (scope["method"], scope["path"]) == ("POST", WEIGHTS):
            if self._weights_key is None:
                message = "weights cannot be changed over HTTP here: start the server with --weights-key."
                raise ApiError(403, message, code="no_weights_key")
            _check_bearer(headers, self._weights_key, "key for weights")
            return
        if self._sessions is None or scope["path"] in _OPEN:
            return
        if "authorization" in headers or not self._sessions.holds(headers.getlist("cookie")):
            _check_bearer(headers, self._sessions.key, "API key")

    async def _read(self, scope: Scope, receive: Receive, limit: int, held: list[int]) -> bytes:
        """Reads the whole body; ``held[0]`` becomes the bytes that it takes from the budget of all large bodies.

        Raises:
            ApiError: it is larger than ``limit`` (413) or did not arrive in time (408), the client hung up (499), or
                all large bodies together exceed their budget (429).
        """
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in Request(scope, receive).stream():
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    if size > _SMALL_BODY:
                        self._hold(size, held)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {_BODY_SECONDS:g} s.",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise ApiError(_CLIENT_GONE, "the client hung up.", code="client_closed_request") from None
        return b"".join(parts)

    def _hold(self, size: int, held: list[int]) -> None:
        self._bytes_left -= size - held[0]
        held[0] = size
        if self._bytes_left < 0:
            message = "too many large bodies at once; try again shortly."
            raise ApiError(429, message, code="too_many_bodies", headers={"Retry-After": "1"})


def _check_size(scope: Scope, limit: int) -> None:
    """Refuses a body whose ``Content-Length`` is too large, before any of it is read; the HTTP layer drops it."""
    digits = Headers(scope=scope).get("content-length", "").strip().lstrip("0")
    if len(digits) > len(str(limit)) or int(digits or "0") > limit:
        raise _too_large(limit)


def _check_bearer(headers: Headers, key: bytes, name: str) -> None:
    """Refuses a request whose ``Authorization`` is not ``key``."""
    header = headers.get("authorization")
    kind, _, given = (header or "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1").strip(), key):
        raise ApiError(
            401,
            f"give the server's {name} as `Authorization: Bearer <key>`.",
            code="missing_api_key" if header is None else "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _too_large(limit: int) -> ApiError:
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit:,} bytes"
    return ApiError(413, f"the body is larger than {size}: send less at once.", code="body_too_large")


def _wants_page(scope: Scope) -> bool:
    return scope["method"] == "GET" and scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", "")


def _request_id(scope: Scope) -> str:
    """The client's ``X-Request-ID`` if it is a plain word, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class _LazyBody:
    """The body of a request, read once, and so only when a route or a check asks for it."""

    def __init__(self, read: Callable[[], Awaitable[bytes]], receive: Receive) -> None:
        self._read, self._receive = read, receive
        self._body: bytes | None = None
        self._given = False

    async def read(self) -> bytes:
        if self._body is None:
            self._body = await self._read()
        return self._body

    async def receive(self) -> Message:
        """The body as one message, and then what the original gives, to notice a disconnect."""
        if self._given:
            return await self._receive()
        self._given = True
        return {"type": "http.request", "body": await self.read(), "more_body": False}
