"""Who may ask an engine's server, and what it answers where a request is refused: one line."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_pl.rollout.remote.seat import Lost, NotYours
from grpo_pl.rollout.remote.wire import Malformed


class Refusal(HTTPException):
    """A request that is not answered; one line says why."""

    def __init__(self, status: int, message: str, code: str, **values: Any) -> None:
        super().__init__(status, " ".join(message.split())[:500])
        self.body = {"error": {"message": self.detail, "code": code, **values}}


class Guard:
    """Checks token and sender before anything of a body is read."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        app = self._app if refusal is None else _refused(refusal)
        await app(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> Refusal | None:
        if "origin" in headers:
            return Refusal(403, "this is no server for web pages.", "web_page")
        if self._token is None or path == "/health":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token.encode()):
            return None
        return Refusal(401, "give the engine's token as `Authorization: Bearer <token>`.", "token")


def too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body is larger than {limit / 2**20:g} MiB.", "too_large")


def _refused(refusal: Refusal) -> Response:
    """What is left of a body is read and dropped, so that its sender sees the answer; but not of a stranger's."""
    stranger = {"Connection": "close", "WWW-Authenticate": "Bearer"} if refusal.status_code in (401, 403) else {}
    return JSONResponse(refusal.body, refusal.status_code, headers=stranger)


@contextmanager
def answered() -> Iterator[None]:
    """Errors before an answer has begun, by their status."""
    try:
        yield
    except NotYours as error:
        raise Refusal(409, str(error), "in_use", ends_in_s=round(error.ends_in_s, 3)) from None
    except Lost as error:
        raise Refusal(409, str(error), "lost") from None
    except Malformed as error:
        raise Refusal(400, str(error), "malformed") from None


async def on_refusal(request: Request, error: HTTPException) -> Response:
    if not isinstance(error, Refusal):
        error = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.", "no_route")
    return _refused(error)


async def on_bug(request: Request, error: Exception) -> Response:
    return _refused(Refusal(500, "internal error; the server's output has the details.", "internal"))
