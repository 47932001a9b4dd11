"""Limits on connections, with the real protocol in a small server of this process and short times."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import serve.protocol as protocol
from serve.protocol import BoundedProtocol, ConnectionLimit, Handshake

LIMIT = 4
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
arrived = threading.Semaphore(0)
"""Released for every byte of a body that the server has read."""
begun, may_end = threading.Semaphore(0), threading.Event()
"""Released for every request for `/slow`, and what their answers wait for."""
given_up = threading.Semaphore(0)
"""Released for every answer of `/large` whose connection has ended."""


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the body is there; `/slow` once it may, `/large` with more than a socket holds, `/headers` with
    the names of the headers, `/host` with the host, `/echo` with the body, `/early` before the body is there."""
    more, read = scope["path"] != "/early", b""
    while more:
        message = await receive()
        more = message.get("more_body", False)
        if body := message.get("body"):
            arrived.release(len(body))
            read += body
    if scope["path"] == "/slow":
        begun.release()
        while not may_end.is_set():
            await asyncio.sleep(0.01)
    body = b"x" * (32 << 20) if scope["path"] == "/large" else b"ok"
    if scope["path"] == "/headers":
        body = b" ".join(name for name, _ in scope["headers"])
    if scope["path"] == "/host":
        body = b" ".join(value for name, value in scope["headers"] if name == b"host")
    if scope["path"] == "/echo":
        body = read
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": scope["path"] == "/large"})
    if scope["path"] == "/large":
        while (await receive())["type"] != "http.disconnect":
            pass
        given_up.release()


@contextlib.contextmanager
def _listening(
    places: int, context: ssl.SSLContext | None = None, loop: Callable[[], Any] = asyncio.new_event_loop
) -> Iterator[Callable[[], socket.socket]]:
    """Opens connections to a server, which speaks TLS where it has a context."""
    limit = ConnectionLimit(places)
    config = uvicorn.Config(
        _app,
        lifespan="off",
        ws="none",
        log_config=None,
        backlog=protocol.ACCEPTED_AT_ONCE,
        http=partial(BoundedProtocol, limit=limit)
        if context is None
        else partial(Handshake, limit=limit, context=context),
    )
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(server.serve([listener]))

    thread = threading.Thread(target=serve)
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


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], socket.socket]]:
    """Opens connections to a server with four places, 0.2 s for a head and 0.2 s for an unread answer."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "WRITE_SECONDS", 0.2)
    may_end.clear()
    while begun.acquire(blocking=False):  # an earlier test's
        pass
    with _listening(LIMIT) as connect:
        yield connect


@pytest.fixture(scope="module")
def connect() -> Iterator[Callable[[], socket.socket]]:
    """Opens connections to one server that has the usual times and many places."""
    with _listening(256) as connect:
        yield connect


def _all(connection: socket.socket, sent: bytes = b"") -> bytes:
    """What comes back until the server closes; it may refuse to read all that is sent."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        connection.sendall(sent)
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def _error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def _get(connection: socket.socket, path: bytes = b"/") -> bytes:
    return _all(connection, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\n", GET + b"X: 1"])
def test_a_head_that_does_not_come_is_408(listen: Any, sent: bytes) -> None:
    assert _error(_all(listen(), sent)) == (408, "head_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n\r\n"])
def test_a_connection_on_which_nothing_is_asked_is_closed(listen: Any, sent: bytes) -> None:
    assert _all(listen(), sent) == b""


@pytest.mark.parametrize("sent", [b"GET / HT", b"\r\n"])
def test_the_time_for_a_head_counts_for_later_requests_too(listen: Any, sent: bytes) -> None:
    connection = listen()
    connection.sendall(GET + b"\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    connection.sendall(sent)
    assert b"200" not in _all(connection)


@pytest.mark.parametrize("sent", [GET + b"X: " + b"a" * 300_000, (GET + b"X: 1\r\n" * 12_000 + b"\r\n"), b"G" * 70_000])
def test_a_head_has_a_size(listen: Any, sent: bytes) -> None:
    answer = _all(listen(), sent)
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
    assert all(given_up.acquire(timeout=60) for _ in lazy)  # before any is read: a client that reads is waited for
    assert _get(listen()).startswith(b"HTTP/1.1 200")
    assert all(len(_all(connection)) < 32 << 20 for connection in lazy)


def test_requests_ahead_of_their_answers_are_few(listen: Any) -> None:
    few, many = listen(), listen()
    few.sendall((GET + b"\r\n") * 4 + GET + b"Connection: close\r\n\r\n")
    assert _all(few).count(b"HTTP/1.1 200") == 5
    many.sendall((b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n") * 1000)
    assert _all(many) == b""


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["asyncio", "uvloop"])
def secured(
    request: pytest.FixtureRequest, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[[], socket.socket], ssl.SSLContext]]:
    """Opens connections to a server with four places and a certificate, without their handshake; the client's side."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 2.0)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    new_loop = asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with _listening(LIMIT, context, new_loop) as connect:
        yield connect, ssl.create_default_context(cafile=certificate / "cert.pem")


def _get_securely(connection: socket.socket, client: ssl.SSLContext) -> bytes:
    with client.wrap_socket(connection, server_hostname="localhost") as secure:
        return _get(secure)


HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the beginning of a client's first message
SILENT: dict[str, Callable[[socket.socket], Any]] = {
    "nothing": lambda connection: None,
    "half a hello": lambda connection: connection.sendall(HELLO),
    "no TLS": lambda connection: connection.sendall(GET + b"\r\n"),
    "gone": lambda connection: connection.close(),
    "half closed": lambda connection: connection.shutdown(socket.SHUT_WR),
}


@pytest.mark.parametrize("does", SILENT)
def test_handshakes_that_do_not_come_keep_nobody_out(secured: Any, does: str) -> None:
    connect, client = secured
    silent = [connect() for _ in range(5 * LIMIT)]
    for connection in silent:
        with contextlib.suppress(ConnectionError):
            SILENT[does](connection)
    for _ in range(2 * LIMIT):
        assert _get_securely(connect(), client).endswith(b"ok")
    for connection in silent:
        if connection.fileno() >= 0:
            assert b"HTTP" not in _all(connection)  # the server closes it in the time for a head


def test_a_request_that_comes_with_the_end_of_its_handshake_is_answered(secured: Any) -> None:
    connect, client = secured
    for _ in range(20):
        incoming, outgoing, connection = ssl.MemoryBIO(), ssl.MemoryBIO(), connect()
        secure = client.wrap_bio(incoming, outgoing, server_hostname="localhost")
        while True:
            try:
                secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(1 << 16))
        secure.write(LAST)
        connection.sendall(outgoing.read())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            try:
                answer += secure.read(1 << 16)
            except ssl.SSLWantReadError:
                incoming.write(connection.recv(1 << 16))
        assert answer.startswith(b"HTTP/1.1 200")


ECHO = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OFFERS = {
    "as Java's HttpClient": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "of a websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
    "of several": b"upgrade: TLS/1.0, h2c\r\nconnection: upgrade\r\n",
    "in two lines": b"Upgrade: a\r\nUpgrade: b\r\nConnection: Upgrade\r\n",
    "with Expect": b"Connection: Upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n",
}
BODIES = {
    "a length": (b'Content-Length: 7\r\n\r\n{"a":1}', b'{"a":1}'),
    "chunks": (b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n', b'{"a":1}'),
    "a long body": (b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000, b"x" * 300_000),
    "no body": (b"\r\n", b""),
}


@pytest.mark.parametrize(
    ("offer", "body", "bytewise"),
    [(offer, body, False) for offer in OFFERS for body in BODIES] + [("with Expect", "chunks", True)],
)
def test_an_offer_of_another_protocol_is_ignored(connect: Any, offer: str, body: str, bytewise: bool) -> None:
    """RFC 9110, 7.8: the request is answered with its body, also before and after others on the connection."""
    sent, read = BODIES[body]
    request = ECHO + OFFERS[offer] + sent
    stream = ECHO + b"Content-Length: 1\r\n\r\na" + request + request + LAST
    connection = connect()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in [stream[i : i + 1] for i in range(len(stream))] if bytewise else [stream]:
        connection.sendall(piece)
    answers = _all(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 OK\r\n")
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers[1:]] == [b"a", read, read, b""]


def test_an_offer_in_http_1_0_is_ignored(connect: Any) -> None:
    head = b"POST /echo HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n"
    assert _all(connect(), head + b"{}").endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
        *(b"GET / HTTP/" + version + b"\r\nHost: localhost\r\n\r\n" for version in (b"0.9", b"2.0")),
    ],
)
def test_another_version_is_505_in_one_answer(connect: Any, sent: bytes) -> None:
    assert _error(_all(connect(), sent)) == (505, "http_version_not_supported")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Transfer-Encoding: gzip, chunked", 501), (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", 501),
        (b"Transfer-Encoding: identity, chunked", 501), (b"Transfer-Encoding: , chunked", 501),
        (b"Transfer-Encoding: chunked;q=1", 400), (b"Transfer-Encoding: gzip", 400),
        (b"Transfer-Encoding: chunked, gzip", 400), (b"Transfer-Encoding: chunked, chunked", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400), (b"Transfer-Encoding:", 400),
        (b"Transfer-Encoding : chunked", 400), (b"Transfer-Encoding: chunked\r\nContent-Length: 7", 400),
        (b"Content-Length: 7\r\nTransfer-Encoding: chunked", 400), (b"Content-Length: 7\r\nContent-Length: 7", 400),
        (b"Content-Length: 7, 7", 400), (b"Content-Length: +7", 400),
        (b"Content-Length: 99999999999999999999", 400), (b"Content-Length: ", 400), (b"X: 1\r\n 2", 400),
        (b"Content-Length: 0x7", 400), (b"Content-Length: 1_0", 400), (b" Transfer-Encoding: chunked", 400),
        (b"Transfer-Encoding:\r\n chunked", 400), (b"Transfer-Encoding: identity", 400),
        (b"Transfer-Encoding: xchunked", 400), (b"Transfer-Encoding: \x0bchunked", 400),
        (b"X: 1\nTransfer-Encoding: chunked", 400), (b"X: 1\rTransfer-Encoding: chunked", 400), (b"X: \0", 400),
        (b"X\0: 1", 400), (b"X", 400),
    ],
)  # fmt: skip
def test_a_body_that_other_programs_could_read_in_another_way_is_refused(
    connect: Any, head: bytes, status: int
) -> None:
    """RFC 9112, 2.2, 5 and 6; what follows on the connection is not read as a request."""
    for upgrade in (b"", OFFERS["of a websocket"]):
        answer = _all(connect(), ECHO + upgrade + head + b"\r\n\r\n0\r\n\r\n" + LAST)
        assert _error(answer)[0] == status
        assert answer.count(b"HTTP/1.1") == 1
        assert b"connection: close" in answer.lower()


def test_chunks_in_http_1_0_are_refused(connect: Any) -> None:
    """RFC 9112, 6.1."""
    answer = _all(connect(), b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + LAST)
    assert _error(answer) == (400, "invalid_http")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"/host", b"localhost"),
        (b"http://evil.example/host", b"evil.example"),
        (b"HTTP://evil.example:99/host?x", b"evil.example:99"),
        (b"https://[::2]/host", b"[::2]"),
    ],
)
def test_the_host_of_a_whole_url_is_the_one_that_counts(connect: Any, target: bytes, host: bytes) -> None:
    """RFC 9112, 3.2.2."""
    for lines in (b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b" HTTP/1.0\r\n\r\n"):
        connection = connect()
        connection.sendall(b"GET " + target + lines)
        named = host if b"Host" in lines or b"//" in target else b""
        assert _all(connection).partition(b"\r\n\r\n")[2] == named


@pytest.mark.parametrize(
    "target", [b"ftp://localhost/", b"http://evil.example@localhost/", b"http:///", b"http://localhost:99999/"]
)
def test_a_url_that_is_not_of_this_server_is_refused(connect: Any, target: bytes) -> None:
    assert _error(_all(connect(), b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")) == (400, "invalid_http")


def test_a_whole_url_without_a_path_means_the_root(connect: Any) -> None:
    assert _all(connect(), LAST.replace(b"/echo", b"http://localhost")).endswith(b"ok")


@pytest.mark.parametrize("rest", [b"NOT HTTP\r\n\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx"])
def test_a_request_behind_others_is_refused_in_its_turn(listen: Any, rest: bytes) -> None:
    connection = listen()
    connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n" + LAST.replace(b": close", b": x") + rest)
    assert begun.acquire(timeout=60)
    may_end.set()
    answers = _all(connection).split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers] == [b"", b"200", b"200", b"400"]
    assert _error(answers[-1].replace(b"400", b"HTTP/1.1 400", 1)) == (400, "invalid_http")


def test_half_a_head_behind_another_request_is_refused_in_its_turn(listen: Any) -> None:
    connection = listen()
    connection.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT")
    assert begun.acquire(timeout=60)
    time.sleep(0.4)  # longer than a head may take
    may_end.set()
    assert [answer[:3] for answer in _all(connection).split(b"HTTP/1.1 ")] == [b"", b"200", b"408"]


def test_one_request_has_one_answer_whatever_its_body_holds(connect: Any) -> None:
    """The answer came before the body, which turns out to be broken."""
    connection = connect()
    connection.sendall(b"POST /early HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    answer = b""
    while not answer.endswith(b"ok"):  # head and body may come apart
        answer += (part := connection.recv(1 << 16))
        assert part
    connection.sendall(b"x\r\n")
    assert _all(connection) == b""


CHUNKED = b"POST /headers HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_headers_behind_the_body_change_nothing(connect: Any) -> None:
    answer = _all(connect(), CHUNKED + b"2\r\nab\r\n0\r\nOrigin: http://evil.example\r\nX: 1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\nhost connection transfer-encoding")


@pytest.mark.parametrize(
    "sent",
    [
        b"0\r\nX: " + b"a" * 2_000_000,
        b"0\r\n" + b"X: 1\r\n" * 300_000,
        b"1;" + b"x" * 2_000_000,
        b"1;" + b"x" * 20_000 + b"\r\na\r\n0\r\n\r\n",
        b"0" * 100_000 + b"1\r\na\r\n0\r\n\r\n",
        b"0" * 20_000 + b"1\r\na\r\n0\r\n\r\n",
        b"0" * 20_000 + b"\r\n\r\n",
        (b"1;" + b"x" * 1000 + b"\r\na\r\n") * 100 + b"0\r\n\r\n",
    ],
    ids=["trailer", "trailers", "extension", "whole extension", "100,000 zeros", "zeros", "zeros at the end", "sum"],
)
def test_what_is_neither_head_nor_body_has_a_size(connect: Any, sent: bytes) -> None:
    answer = _all(connect(), CHUNKED + b"2\r\nab\r\n" + sent)
    assert answer == b"" or _error(answer) == (400, "invalid_http")  # what is not read yet may cost it the answer


@pytest.mark.parametrize(
    "chunk", [b"1\r\na\r\n", b"00000001\r\na\r\n", b"1000;chunk-signature=%064d\r\n%04096d\r\n" % (1, 2)]
)
def test_many_chunks_are_one_body(connect: Any, chunk: bytes) -> None:
    """Small ones, and those of S3's clients, which sign each."""
    assert _all(connect(), CHUNKED + chunk * (700_000 // len(chunk)) + b"0\r\n\r\n").startswith(b"HTTP/1.1 200")
