"""``Guard``: the ASGI layer around all routes that checks length, key, body and sender of each request.

For the page of a server with a key there is a login form, which gives the browser a session cookie.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import re
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import ApiError
from serve.logs import log_request
from serve.settings import ServeSettings
from serve.weights import WEIGHTS

_OPEN = frozenset({"/health"})
_BODY_SECONDS = 30.0
_SMALL_BODY = 1 << 16
_LARGE_BODIES = 8  # of the largest size, or as many bytes in smaller ones, are in memory at once
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_CLIENT_GONE = 499
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_OWN_SITES = ("same-origin", "none")  # the server's own page, and addresses that a person typed or opened

_LOGIN = "/login"
_LOGIN_BYTES = 4096
_SESSION_S = 12 * 3600
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>grpo_pl: log in</title><style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 22rem; margin: 18vh auto 0; padding: 0 1rem; }
input, button { font: inherit; display: block; width: 100%; box-sizing: border-box; margin-top: .6rem; padding: .5rem; }
</style></head><body><main><h1>grpo_pl</h1>
<form method="post" action="/login"><label>API key of this server
<input id="key" type="password" name="key" autocomplete="current-password" required autofocus></label>
<button>Log in</button></form><p role="alert">MESSAGE</p></main></body></html>
"""
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
    """Wraps the application: gives each request an id, checks it, and logs its answer.

    Args:
        port: the port that the server listens on.
        observe: called after every request.
    """

    def __init__(self, app: ASGIApp, *, settings: ServeSettings, port: int, observe: ObserveFn) -> None:
        self._app, self._origins, self._observe = app, OriginCheck(settings), observe
        self._weights_key = None if settings.weights_key is None else settings.weights_key.encode()
        self._sessions = None if settings.api_key is None else _Sessions(settings.api_key.encode(), port)
        self._max_body = settings.max_body_mb << 20
        self.free_memory = _LARGE_BODIES * self._max_body
        """Bytes that the bodies of all requests may still take together."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, method = time.monotonic(), _CLIENT_GONE, scope["method"]
        headers, body_asked = Headers(scope=scope), False
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
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
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                if "expect" in headers and not body_asked:  # the client may send its body all the same
                    answered["connection"] = "close"
                for name, value in _HEADERS.items():
                    answered.setdefault(name, value)
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
        """Checks length, key, body and sender, in this order, and hands the request on."""
        headers, target = Headers(scope=scope), (scope["method"], scope["path"])
        sessions = self._sessions if target == ("POST", _LOGIN) else None
        body = _Body(scope, receive, limit=self._max_body if sessions is None else _LOGIN_BYTES, guard=self)
        try:
            body.check_announced_length()
            if sessions is None:
                self._check_key(scope)
            if "expect" not in headers:  # the client may not listen before it has sent its body
                await body.read()
            if scope["path"] not in _OPEN:
                self._origins.check(scope)
            if sessions is None:
                await self._app(scope, body.receive, send)
            else:
                answer = sessions.open(await body.read(), secure=scope["scheme"] == "https")
                await answer(scope, receive, send)
        except ApiError as error:
            shows_page = error.status == 401 and target == ("GET", "/") and "text/html" in headers.get("accept", "")
            await (_login_page() if shows_page else error.response())(scope, receive, send)
        finally:
            body.release()

    def _check_key(self, scope: Scope) -> None:
        headers, sessions = Headers(scope=scope), self._sessions
        if (scope["method"], scope["path"]) == ("POST", WEIGHTS):
            if self._weights_key is None:
                message = "weights cannot be changed over HTTP here: start the server with --weights-key."
                raise ApiError(403, message, code="no_weights_key")
            _check_bearer(headers, self._weights_key, "key for weights")
            return
        if sessions is None or scope["path"] in _OPEN:
            return
        if "authorization" in headers or not sessions.holds(headers):
            _check_bearer(headers, sessions.key, "API key")


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


class _Body:
    """The body of a request, read once, when a check or a route asks for it."""

    def __init__(self, scope: Scope, receive: Receive, *, limit: int, guard: Guard) -> None:
        self._scope, self._receive, self._limit, self._guard = scope, receive, limit, guard
        self._bytes: bytes | None = None
        self._handed_on = False
        self._held = 0  # bytes of the shared memory

    def check_announced_length(self) -> None:
        """Refuses a body whose ``Content-Length`` is too large, before any of it is read; the HTTP layer drops it."""
        digits = Headers(scope=self._scope).get("content-length", "").strip().lstrip("0")
        if len(digits) > len(str(self._limit)) or int(digits or "0") > self._limit:
            raise self._too_large()

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is too large (413) or did not arrive in time (408), the client hung up (499), or all large
                bodies together take too much memory (429).
        """
        if self._bytes is not None:
            return self._bytes
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in Request(self._scope, self._receive).stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._limit:
                        raise self._too_large()
                    if size > _SMALL_BODY:
                        self._guard.free_memory -= size - self._held
                        self._held = size
                        if self._guard.free_memory < 0:
                            message = "too many large bodies at once; try again shortly."
                            raise ApiError(429, message, code="too_many_bodies", headers={"Retry-After": "1"})
        except TimeoutError:
            message, close = f"the body did not arrive within {_BODY_SECONDS:g} s.", {"Connection": "close"}
            raise ApiError(408, message, code="body_timeout", headers=close) from None
        except ClientDisconnect:
            raise ApiError(_CLIENT_GONE, "the client hung up.", code="client_closed_request") from None
        self._bytes = b"".join(parts)
        return self._bytes

    async def receive(self) -> Message:
        """The body as one message, and then what the original gives, to notice a disconnect."""
        if self._handed_on:
            return await self._receive()
        self._handed_on = True
        return {"type": "http.request", "body": await self.read(), "more_body": False}

    def release(self) -> None:
        """Gives back its part of the shared memory; called once, when the request is answered."""
        self._guard.free_memory += self._held

    def _too_large(self) -> ApiError:
        limit = self._limit
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit:,} bytes"
        return ApiError(413, f"the body is larger than {size}: send less at once.", code="body_too_large")


class OriginCheck:
    """Checks ``Host``, ``Origin`` and ``Sec-Fetch-Site``; clients that are not browsers send only the first.

    Without the check of ``Host``, a foreign page could resolve its own name to the server's address (DNS rebinding) and
    read answers. Without that of ``Origin``, it could make the browser send requests, although not read the answers.
    """

    def __init__(self, settings: ServeSettings) -> None:
        listening = [ip_address(address[0].partition("%")[0]) for _, address in settings.addresses]
        self._anywhere = any(address.is_unspecified for address in listening)
        own = [socket.gethostname()] if any(not address.is_loopback for address in listening) else []
        self._names = {name.lower().rstrip(".") for name in ("localhost", *own, *settings.allowed_hosts)}
        self._addresses = {*listening, ip_address("127.0.0.1"), ip_address("::1")}
        self._cors = frozenset(origin.rstrip("/").lower() for origin in settings.cors_origins)

    def check(self, scope: Scope) -> None:
        """Refuses requests that a page of another site may have sent.

        Raises:
            ApiError: not exactly one valid ``Host`` (400), a foreign ``Host`` (403), or a foreign page (403).
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if not hosts and scope["http_version"] == "1.0":  # which has no such header; every browser sends it
            hosts = ["localhost"]
        if len(hosts) != 1 or not (match := _HOST.fullmatch(hosts[0].strip().lower())):
            raise ApiError(400, "send one `Host` header with the server's name.", code="invalid_host")
        name = match[1].rstrip(".")
        if not self._is_own(name):
            message = f"this server is not called {name!r}; if it should be, start it with --allowed-host {name}."
            raise ApiError(403, message, code="host_not_allowed")
        origins = [value.lower() for value in headers.getlist("origin")]
        if any(origin not in self._cors and origin.partition("://")[2] != match[0] for origin in origins):
            message = f"pages of {origins[0]} may not use this server; if they should, start it with --cors-origin."
            raise ApiError(403, message, code="origin_not_allowed")
        if origins or all(site in _OWN_SITES for site in headers.getlist("sec-fetch-site")):
            return
        if headers.getlist("sec-fetch-mode") != ["navigate"] or scope["method"] != "GET" or scope["path"] != "/":
            raise ApiError(403, "pages of other sites may link to `/` and to nothing else.", code="origin_not_allowed")

    def _is_own(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._anywhere or address in self._addresses


class CrossOrigin(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in the common format of errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = "a page of this origin may not send such a request to this server."
        return ApiError(403, message, code="origin_not_allowed").response()


class _Sessions:
    """Sessions as signed cookies; a restart of the server ends all sessions.

    Args:
        key: the server's API key, with which a session is opened.
        port: part of the cookie's name, because browsers share cookies between ports of a host.
    """

    def __init__(self, key: bytes, port: int) -> None:
        self.key, self._secret, self._name = key, secrets.token_bytes(32), f"grpo_pl_{port}"

    def holds(self, headers: Headers) -> bool:
        """True if the cookies of a request hold a session that has not expired.

        They are read here, because the standard library takes seconds for hostile ones before Python 3.11.10, and this
        comes before the key is checked; the own cookie needs no quotes.
        """
        pairs = [pair.partition("=") for line in headers.getlist("cookie") for pair in line.split(";")]
        own = {name.strip(): value.strip() for name, _, value in pairs}.get(self._name, "")
        expires, _, seal = own.partition(".")
        sealed = hmac.compare_digest(seal.encode("utf-8", "replace"), self._seal(expires).encode())
        return sealed and int(expires) > time.time()

    def open(self, form: bytes, *, secure: bool) -> Response:
        """The answer to the form: a redirect to the page with a session cookie, or the form again for a wrong key."""
        try:
            given = parse_qs(form.decode("latin-1"), max_num_fields=4, encoding="utf-8").get("key", [""])[0]
        except ValueError:
            given = ""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.key):
            return _login_page("This is not the key.")
        expires = str(int(time.time()) + _SESSION_S)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            self._name,
            f"{expires}.{self._seal(expires)}",
            max_age=_SESSION_S,
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return answer

    def _seal(self, expires: str) -> str:
        return hmac.new(self._secret, expires.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def _login_page(message: str = "") -> Response:
    """The form, with status 401."""
    headers = {
        "Content-Security-Policy": _POLICY,
        "WWW-Authenticate": "Bearer",
        "Referrer-Policy": "same-origin",  # with `no-referrer` a browser would send the form with a null `Origin`
    }
    return HTMLResponse(_FORM.replace("MESSAGE", html.escape(message)), status_code=401, headers=headers)
