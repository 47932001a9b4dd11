"""What tests ask: routes, bodies and requests; and how bodies are read without a server."""

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel

from serve import bodies

CHAT, COMPLETIONS, SCORE, EVALUATE = "/v1/chat/completions", "/v1/completions", "/v1/score", "/v1/evaluate"
HELLO = [{"role": "user", "content": "1+1="}]
T = TypeVar("T", bound=BaseModel)


def parse(kind: type[T], body: bytes) -> T:
    """The request in ``body``, or the refusal as ``ApiError``."""
    return bodies.parsed(kind, body)


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a body of JSON, unless a header says otherwise."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}", *headers]
    if not any(header.lower().startswith("content-type:") for header in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    answer = b""
    while part := connection.recv(1 << 16):
        answer += part
    return answer


def streamed(chunks: Iterable[Any], n: int = 1) -> list[str]:
    """The text of each choice of a stream of chats or completions."""
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
    return texts


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on an event loop of its own."""

    @functools.wraps(test)
    def run(*given: Any, **fixtures: Any) -> None:
        asyncio.run(test(*given, **fixtures))

    return run
