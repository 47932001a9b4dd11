"""Limits on connections, with the real protocol in a small server of this process and short times."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn

import serve.protocol as protocol
from serve.protocol import BoundedProtocol, Crowd

LIMIT = 4
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
arrived = threading.Semaphore(0)
"""Released for every byte of a body that the server has read."""
begun, may_end = threading.Semaphore(0), threading.Event()
"""Released for every request for `/slow`, and what their answers wait for."""


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the body is there; `/slow` once it may, `/large` with more than a socket holds, `/headers` with
    the names of the headers."""
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
        if body := message.get("body"):
            arrived.release(len(body))
    if scope["path"] == "/slow":
        begun.release()
        while not may_end.is_set():
            await asyncio.sleep(0.01)
    body = b"x" * (32 << 20) if scope["path"] == "/large" else b"ok"
    if scope["path"] == "/headers":
        body = b" ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """Opens connections to a server with four places, 0.5 s for a head and 0.5 s for an unread answer."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.5)
    config = uvicorn.Config(
        _app,
        lifespan="off",
        ws="none",
        log_config=None,
        backlog=protocol.ACCEPTED_AT_ONCE,
        http=partial(BoundedProtocol, crowd=Crowd(LIMIT)),
    )
    may_end.clear()
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    address = listener.getsockname()
    thread.start()
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection(address, timeout=120))
        return opened[-1]

    yield connect
    may_end.set()
    for connection in opened:
        connection.close()
    server.should_exit = True
    thread.join(30)


def _all(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def _error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def _get(connection: socket.socket, path: bytes = b"/") -> bytes:
    connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return _all(connection)


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\n", GET + b"X: 1"])
def test_a_head_that_does_not_come_is_408(listen: Any, sent: bytes) -> None:
    connection = listen()
    connection.sendall(sent)
    assert _error(_all(connection)) == (408, "head_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n\r\n"])
def test_a_connection_on_which_nothing_is_asked_is_closed(listen: Any, sent: bytes) -> None:
    connection = listen()
    connection.sendall(sent)
    assert _all(connection) == b""


@pytest.mark.parametrize("sent", [b"GET / HT", b"\r\n"])
def test_the_time_for_a_head_counts_for_later_requests_too(listen: Any, sent: bytes) -> None:
    connection = listen()
    connection.sendall(GET + b"\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.sendall(sent)
    assert b"200" not in _all(connection)


@pytest.mark.parametrize("sent", [GET + b"X: " + b"a" * 300_000, (GET + b"X: 1\r\n" * 12_000 + b"\r\n"), b"G" * 70_000])
def test_a_head_has_a_size(listen: Any, sent: bytes) -> None:
    connection = listen()
    connection.sendall(sent)
    answer = _all(connection)
    assert _error(answer) in ((431, "head_too_large"), (400, "invalid_http"))
    assert _get(listen()).startswith(b"HTTP/1.1 200")


def test_half_requests_keep_nobody_out(listen: Any) -> None:
    """The one that has waited longest makes room."""
    halves = [listen() for _ in range(3 * LIMIT)]
    for half in halves:
        with contextlib.suppress(ConnectionError):
            half.sendall(b"GET / HT")
    assert _get(listen()).startswith(b"HTTP/1.1 200")


def test_half_bodies_keep_nobody_out(listen: Any) -> None:
    for _ in range(2 * LIMIT):
        listen().sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    assert _get(listen()).startswith(b"HTTP/1.1 200")


def test_a_body_that_goes_on_keeps_its_place(listen: Any) -> None:
    while arrived.acquire(blocking=False):  # an earlier test's
        pass
    sending = listen()
    sending.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 5\r\n\r\n")
    for _ in range(5):
        sending.sendall(b"x")
        assert arrived.acquire(timeout=120)
        others = [listen() for _ in range(LIMIT - 1)]
        others[-1].sendall(GET + b"\r\n")  # its answer says that all of them are in
        assert others[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert _all(sending).startswith(b"HTTP/1.1 200")


def test_idle_connections_keep_nobody_out(listen: Any) -> None:
    for _ in range(2 * LIMIT):
        connection = listen()
        connection.sendall(GET + b"\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert _get(listen()).startswith(b"HTTP/1.1 200")


def test_requests_at_work_keep_their_places(listen: Any) -> None:
    while begun.acquire(blocking=False):  # an earlier test's
        pass
    busy = [listen() for _ in range(LIMIT)]
    for connection in busy:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert all(begun.acquire(timeout=60) for _ in busy)
    assert _error(_all(listen())) == (503, "too_many_connections")
    may_end.set()
    assert all(_all(connection).startswith(b"HTTP/1.1 200") for connection in busy)
    assert _get(listen()).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_reads_is_given_up(listen: Any) -> None:
    lazy = [listen() for _ in range(LIMIT)]
    for connection in lazy:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    deadline = time.monotonic() + 60
    while not _get(listen()).startswith(b"HTTP/1.1 200"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all(len(_all(connection)) < 32 << 20 for connection in lazy)


def test_requests_ahead_of_their_answers_are_few(listen: Any) -> None:
    few, many = listen(), listen()
    few.sendall((GET + b"\r\n") * 4 + GET + b"Connection: close\r\n\r\n")
    assert _all(few).count(b"HTTP/1.1 200") == 5
    many.sendall((b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n") * 1000)
    assert _all(many) == b""


def test_what_asks_for_another_protocol_is_answered_in_this_one(listen: Any) -> None:
    connection = listen()
    connection.sendall(GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


CHUNKED = b"POST /headers HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_headers_behind_the_body_change_nothing(listen: Any) -> None:
    connection = listen()
    connection.sendall(CHUNKED + b"2\r\nab\r\n0\r\nOrigin: http://evil.example\r\nX: 1\r\n\r\n")
    assert _all(connection).endswith(b"\r\n\r\nhost connection transfer-encoding")


@pytest.mark.parametrize(
    "sent", [b"0\r\nX: " + b"a" * 2_000_000, b"0\r\n" + b"X: 1\r\n" * 300_000, b"1;" + b"x" * 2_000_000]
)
def test_what_is_neither_head_nor_body_has_a_size(listen: Any, sent: bytes) -> None:
    connection = listen()
    with contextlib.suppress(ConnectionError):
        connection.sendall(CHUNKED + b"2\r\nab\r\n" + sent)
    assert _all(connection) == b""


def test_many_small_chunks_are_one_body(listen: Any) -> None:
    connection = listen()
    connection.sendall(CHUNKED + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n")
    assert _all(connection).startswith(b"HTTP/1.1 200")
