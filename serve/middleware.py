"""The layers around all routes: Starlette's for hosts, other origins and the size of bodies, and two of our own."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import socket
import time
import uuid
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError
from serve.settings import ServeSettings

_HEAD_BYTES = 1 << 16
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""Headers of every answer that does not set them itself."""

_KEPT = ("vary", "access-control-allow-origin")  # headers of a refusal in plain text that its JSON has as well
_CODES = {400: "invalid_host", 413: "body_too_large"}


def middlewares(
    settings: ServeSettings, observe: Callable[[str, int, float], None], body_mb: int = 8
) -> list[tuple[Any, dict[str, Any]]]:
    """The layers of a server, the innermost first, as ``LitServer`` takes them; a body has ``body_mb`` MiB at most.

    Args:
        observe: called with route (``other`` without one), status and seconds of each request.
    """
    layers: list[tuple[Any, dict[str, Any]]] = [(RequestBodyLimitMiddleware, {"max_body_size": body_mb << 20})]
    if settings.api_key is not None:
        layers.append((KeyCheck, {"key": settings.api_key}))
    layers.append((OwnHosts, {"settings": settings}))
    if settings.cors_origins:
        cors: dict[str, Any] = {"allow_methods": ["GET", "POST"], "expose_headers": ["X-Request-ID", "Retry-After"]}
        cors["allow_origins"] = settings.cors_origins
        cors["allow_headers"] = ["*"]  # OpenAI's client sends a dozen x-stainless-*
        layers.append((CORSMiddleware, cors))
    return [*layers, (Answers, {"observe": observe})]


class Answers:
    """Gives each answer an id and cautious headers, refusals of the other layers the common format, and counts it."""

    def __init__(self, app: ASGIApp, *, observe: Callable[[str, int, float], None]) -> None:
        self._app, self._observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, headers = time.monotonic(), 500, Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if scope["method"] == "HEAD":  # answered as GET; the HTTP layer leaves the body out
            scope = {**scope, "method": "GET"}
        plain: Message | None = None  # the beginning of a refusal in plain text

        async def answer(message: Message) -> None:
            nonlocal status, plain
            if message["type"] == "http.response.start":
                status = message["status"]
                told = MutableHeaders(scope=message)
                if status >= 400 and told.get("content-type", "").startswith("text/plain"):
                    plain = message
                    return
                told["x-request-id"] = request_id
                for name, value in _HEADERS.items():
                    told.setdefault(name, value)
            elif plain is not None:
                kept = {name: value for name, value in Headers(raw=plain["headers"]).items() if name in _KEPT}
                plain, said = None, message.get("body", b"").decode(errors="replace").rstrip(".")
                hint = ": more than --max-body-mb allows" if status == 413 else ""
                error = ApiError(status, f"{said}{hint}.", code=_CODES.get(status, "http_error"), headers=kept)
                await error.response()(scope, receive, answer)
                return
            await send(message)

        try:
            target = len(scope["raw_path"]) + len(scope["query_string"])
            if target + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > _HEAD_BYTES:
                message = f"the headers are larger than {_HEAD_BYTES >> 10} KiB."
                await ApiError(431, message, code="head_too_large").response()(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        finally:
            self._observe(getattr(scope.get("route"), "path", "other"), status, time.monotonic() - began)


class OwnHosts(TrustedHostMiddleware):
    """Refuses a ``Host`` that is no name of this server: a foreign page could let its own name lead here and read
    answers (DNS rebinding). An address cannot be led elsewhere, so a server that listens on all of them takes any.
    Refuses the requests of pages of other sites, too, which ``cors_origins`` does not name."""

    def __init__(self, app: ASGIApp, *, settings: ServeSettings) -> None:
        listening = [ip_address(address[0].partition("%")[0]) for _, address in settings.addresses]
        self._anywhere, self._cors_origins = any(address.is_unspecified for address in listening), settings.cors_origins
        own = [socket.gethostname()] if any(not address.is_loopback for address in listening) else []
        names = ["localhost", "127.0.0.1", "[::1]", *own, *settings.allowed_hosts]
        names += [f"[{address}]" if address.version == 6 else str(address) for address in listening]
        super().__init__(app, allowed_hosts=names, www_redirect=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        hosts, origin = headers.getlist("host"), headers.get("origin", "").lower()
        app: ASGIApp = super().__call__
        if not hosts and scope["http_version"] == "1.0":  # which has no such header; every browser sends it
            app = self.app
        elif len(hosts) != 1:
            app = ApiError(400, "send one `Host` header with the server's name.", code="invalid_host").response()
        elif origin and origin.partition("://")[2] != hosts[0].lower() and origin not in self._cors_origins:
            message = f"pages of {origin} may not use this server, unless --cors-origin names it."
            app = ApiError(403, message, code="foreign_origin").response()
        elif self._anywhere and _is_address(hosts[0]):
            app = self.app
        await app(scope, receive, send)


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(urlsplit(f"//{host}").hostname or ""))
    except ValueError:
        return False


class KeyCheck:
    """Asks for the key: as a bearer token, or as the password of HTTP basic, for which browsers ask their user."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        if headers is None or scope["path"] == "/health" or self._is_right(headers.get("authorization", "")):
            await self._app(scope, receive, send)
            return
        kind = 'Basic realm="grpo_pl", charset="UTF-8"' if "text/html" in headers.get("accept", "") else "Bearer"
        error = ApiError(
            401,
            "give the server's API key as `Authorization: Bearer <key>`.",
            code="invalid_api_key" if "authorization" in headers else "missing_api_key",
            headers={"WWW-Authenticate": kind},
        )
        await error.response()(scope, receive, send)

    def _is_right(self, header: str) -> bool:
        kind, _, given = header.partition(" ")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given.strip(), validate=True).partition(b":")[2].decode("latin-1")
            except binascii.Error:
                return False
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(given.encode("latin-1").strip(), self._key)
