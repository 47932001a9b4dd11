"""The server's outside: half requests, signals to the group, TLS, names, logs, and what it refuses to start with."""

import json
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.main import main
from serve.settings import API_KEY
from tests.process_list import lives
from tests.serve.bodies import CHAT, HELLO, post, read_all
from tests.serve.conftest import error_of, wait_until


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({API_KEY: ""}, [], "blank"),
        ({API_KEY: " "}, [], "blank"),
        ({}, ["--api-key", ""], "blank"),
        ({}, ["--api-key", "schlüssel"], "ASCII"),
        ({}, ["--host", "0.0.0.0"], "--no-key"),
        ({}, ["--host", "::"], "--no-key"),
        ({}, ["--host", "0"], "--no-key"),
        ({}, ["--host", "::ffff:0.0.0.0"], "--no-key"),
        ({API_KEY: "x"}, ["--host", "0.0.0.0", "--no-key"], "both"),
        ({}, ["--host", "no.such.host.invalid"], "no address"),
        ({}, ["--host", "192.0.2.1", "--no-key"], "cannot listen"),
        ({}, ["--port", "70000"], "port"),
        ({}, ["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        ({}, ["--ssl-certfile", "nothing.pem"], "--ssl-certfile: no such file: nothing.pem"),
        ({}, ["--ssl-certfile", ""], "--ssl-certfile: no such file"),
        ({}, ["--allowed-host", "https://example.org/"], "no host name"),
        ({}, ["--cors-origin", "example.org"], "no origin"),
        ({}, ["--cors-origin", "*"], "no origin"),
        ({}, ["--served-model-name", " "], "blank"),
        ({}, ["--weights-key", "secret"], "--follow"),
        ({}, ["--access-log"], "proxy"),
    ],
)
def test_a_server_that_would_be_open_by_mistake_does_not_start(
    export: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--model", str(export), "--port", "0", *options]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_port_that_is_taken_is_said_in_one_line(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(export), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


def test_clients_that_hang_up_leave_the_log_alone(server: Any) -> None:
    before = len(server.log)
    body = {"messages": HELLO, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    request = post(CHAT, json.dumps(body).encode())
    for i in range(60):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(request[: len(request) - i % 3])  # some of them in the middle of the body
            if i % 3 == 0 and i % 2:
                connection.recv(200)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a goodbye
    wait_until(server.is_idle)
    assert len(server.log) - before < 2000, server.log[before:][-3000:]


def _answer(connection: socket.socket) -> tuple[int, Any]:
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_ctrl_c_answers_what_the_server_has(start: Callable[..., Any]) -> None:
    """A terminal sends it to all processes."""
    server = start()
    chat = server.send(CHAT, {"messages": HELLO, "max_tokens": 300, "ignore_eos": True, "n": 8})
    wait_until(lambda: server.metric("running_sequences") == 8)
    os.killpg(server.process.pid, signal.SIGINT)
    status, answer = _answer(chat)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8 * 300)
    assert server.process.wait(120) == 0
    wait_until(lambda: not any(lives(process.pid) for process in server.family))


def test_an_idle_server_ends_soon(start: Callable[..., Any]) -> None:
    server = start()
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 15.0  # 2 to 4 s on a machine of its own
    wait_until(lambda: not any(lives(process.pid) for process in server.family))


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models"])
def test_head_is_get_without_the_body(server: Any, path: str) -> None:
    status, _, _ = server.call("GET", path)
    request = f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        answer = read_all(connection)
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert answer.endswith(b"\r\n\r\n")
    assert re.search(rb"content-length: [1-9]", answer)


def test_a_body_that_declares_itself_too_large_is_refused_before_it_is_sent(server: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: evil.example"], 400),
        (["Host: localhost", "Host: localhost"], 400),
        ([], 400),
        (["Host: localhost", "Origin: https://evil.example"], 403),
        (["Host: localhost", "Origin: http://localhost:1"], 403),
        (["Host: localhost", "Origin: null"], 403),
        (["Host: localhost", "Content-Type: text/plain"], 415),
        (["Host: localhost", "Content-Encoding: gzip"], 415),
        (["Host: localhost", f"Content-Length: {1 << 30}"], 413),
        (["Host: localhost", "Cookie: " + "a" * 66_000], 431),
    ],
)
def test_what_the_headers_show_is_refused_before_a_body_is_asked_for(
    server: Any, lines: list[str], status: int
) -> None:
    defaults = ["Content-Type: application/json", "Content-Length: 100"]
    given = {line.partition(":")[0] for line in lines}
    head = [*lines, *(line for line in defaults if line.partition(":")[0] not in given), "Expect: 100-continue", "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([f"POST {CHAT} HTTP/1.1", *head]).encode())
        answer = connection.recv(1 << 16)
    assert answer.startswith(f"HTTP/1.1 {status}".encode()), answer


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/health", 405)])
def test_no_body_is_asked_for_where_nothing_reads_it(server: Any, path: str, status: int) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1 << 16).startswith(f"HTTP/1.1 {status}".encode())


def test_a_body_that_is_welcome_is_asked_for(server: Any) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for _ in range(2):
            connection.sendall(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)
            answer = b""
            while not answer.endswith(b"}}"):  # of the usage, the last field
                answer += (part := connection.recv(1 << 16))
                assert part, answer
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in answer.lower()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
def test_http_1_0_needs_no_host(server: Any, path: str) -> None:
    """As load balancers ask; no browser does."""
    assert server.exchange(f"GET {path} HTTP/1.0\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
    foreign = server.exchange(f"GET {path} HTTP/1.0\r\nHost: evil.example\r\n\r\n".encode())
    assert foreign.startswith(b"HTTP/1.1 200" if path == "/health" else b"HTTP/1.1 400")


@pytest.fixture(scope="module")
def secured(start: Callable[..., Any], certificate: Path) -> Any:
    """A server with a certificate, names and a model name of its own."""
    files = ["--ssl-certfile", str(certificate / "cert.pem"), "--ssl-keyfile", str(certificate / "key.pem")]
    names = ["--host", "localhost", "--served-model-name", "adder", "--allowed-host", "a.example, b.example"]
    server = start(*files, *names, "--cors-origin", "https://page.example", api_key="secret-2")
    server.address = f"https://localhost:{server.port}"
    server.context = ssl.create_default_context(cafile=certificate / "cert.pem")
    return server


def test_it_speaks_tls_under_the_names_that_it_was_given(secured: Any) -> None:
    assert secured.call("GET", "/v1/models")[1]["data"][0]["id"] == "adder"
    secured.ask(CHAT, {"model": "adder", "messages": HELLO, "max_tokens": 1})
    secured.refusal(CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 1}, 404)
    for host, status in (("a.example", 200), ("B.example:443", 200), ("c.example", 400)):
        assert secured.call("GET", "/v1/models", headers={"Host": host})[0] == status
    assert f"https://localhost:{secured.port}" in secured.log


def test_pages_that_may_use_the_server_can_read_what_it_says(secured: Any) -> None:
    allowed, foreign = {"Origin": "https://page.example"}, {"Origin": "https://evil.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang, x-stainless-retry-count",
    }
    status, _, headers = secured.call("OPTIONS", CHAT, headers=allowed | preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://page.example")
    for key, expected in ((secured.key, 200), ("wrong", 401)):
        status, _, headers = secured.call("GET", "/v1/models", key=key, headers=allowed)
        assert (status, headers["access-control-allow-origin"]) == (expected, "https://page.example")
    status, answer, headers = secured.call("OPTIONS", CHAT, headers=foreign | preflight)
    error_of((status, answer), 400)
    assert "access-control-allow-origin" not in headers
    status, answer, headers = secured.call("GET", "/v1/models", headers=foreign)
    assert error_of((status, answer), 403)["code"] == "foreign_origin" and "access-control-allow-origin" not in headers
    same = {"Origin": f"https://localhost:{secured.port}"}
    assert secured.call("GET", "/v1/models", headers=same)[0] == 200


def test_requests_have_ids(secured: Any) -> None:
    assert secured.call("GET", "/v1/models", headers={"X-Request-ID": "mine-1"})[2]["x-request-id"] == "mine-1"
    made = secured.call("GET", "/v1/nothing", headers={"X-Request-ID": "two words \t"})[2]["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)


def test_an_offer_of_http_2_is_refused_with_what_to_do(server: Any) -> None:
    """As Java's client and `curl --http2` send it; with ``--http h11`` it is answered (tests/serve/clients)."""
    body, offer = json.dumps({"messages": HELLO, "max_tokens": 1}).encode(), ["Connection: Upgrade", "Upgrade: h2c"]
    head, _, told = server.exchange(post(CHAT, body, *offer)).partition(b"\r\n\r\n")
    assert error_of((int(head.split()[1]), json.loads(told)), 400)["code"] == "upgrade_not_supported"
    assert "WebSocket" not in server.log
