"""A request to the application from inside its own process."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message


async def post_in_process(app: ASGIApp, path: str, body: bytes, *, api_key: str | None) -> int:
    """Posts JSON through all layers of ``app`` but the connection; the status of the answer, which is dropped."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if api_key is not None:
        headers.append((b"authorization", b"Bearer " + api_key.encode()))
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
    status, given = 0, False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # the client stays until it is answered
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    return status
