"""``Guard``: the ASGI layer around all routes that checks the key, bounds the body and counts requests."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError

_OPEN = frozenset({"/health"})
_DRAIN_BYTES = 1 << 28  # read and dropped of a body that is too large, so that the client gets to see the answer
_BODY_SECONDS = 30.0

ObserveFn = Callable[[str, int, float], None]
"""Called as ``observe(path, status, seconds)`` after every request."""


class Guard:
    """Wraps the application; knows nothing about what the routes do."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body: int, observe: ObserveFn) -> None:
        self._app, self._max_body, self._observe = app, max_body, observe
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check_key(scope)
                body = await self._read(scope, receive)
            except ApiError as error:
                await error.response()(scope, receive, watched)
                return
            await self._app(scope, _replay(body, receive), watched)
        finally:
            self._observe(scope["path"], status, time.monotonic() - began)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in _OPEN:
            return
        given = _credentials(scope)
        if given is None or not hmac.compare_digest(given, self._key):
            # Basic is for the page: a browser asks for a password and sends it with the page's own requests.
            challenge = 'Bearer, Basic realm="grpo_pl: the API key is the password"'
            raise ApiError(
                401,
                "give the server's API key as `Authorization: Bearer <key>`.",
                code="invalid_api_key" if given is not None else "missing_api_key",
                headers={"WWW-Authenticate": challenge},
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            ApiError: larger than allowed (413), or not there in time (408).
        """
        declared = _header(scope, b"content-length") or b"0"
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= self._max_body:
                        parts.append(part)
                    else:
                        parts.clear()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
                    if size > _DRAIN_BYTES:
                        break
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {_BODY_SECONDS:g} s.", code="body_timeout", headers=_CLOSE
            ) from None
        if size > self._max_body or int(declared) > self._max_body:
            limit = self._max_body / (1 << 20)
            raise ApiError(
                413, f"the body is larger than {limit:g} MiB: send less at once.", code="body_too_large", headers=_CLOSE
            )
        return b"".join(parts)


_CLOSE = {"Connection": "close"}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hands out ``body`` as one message; then passes through, which is how a disconnect is noticed."""
    given = False

    async def again() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return dict(await receive())

    return again


def _credentials(scope: Scope) -> bytes | None:
    header = _header(scope, b"authorization")
    kind, _, value = (header or b"").partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    if kind.lower() == b"basic" and _header(scope, b"sec-fetch-site") in (None, b"same-origin", b"none"):
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return None if header is None else b""


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
