"""The server's outside: half requests, signals to the group, TLS, names, logs, and what it refuses to start with."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_pl.cli.main import main
from serve.settings import API_KEY
from tests.process_list import lives
from tests.serve.bodies import CHAT, EVALUATE, HELLO, post, read_all
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


@pytest.mark.slow
def test_half_requests_stop_nothing_where_descriptors_are_few(start: Callable[..., Any]) -> None:
    server = start(descriptors=256)
    main_process = psutil.Process(server.process.pid)
    before = main_process.num_fds()
    halves = []
    for _ in range(400):
        halves.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        halves[-1].sendall(b"GET /health HT")
    spent = sum(main_process.cpu_times()[:2])
    began = time.monotonic()
    for _ in range(20):
        assert server.call("GET", "/health", timeout=5)[0] == 200
        time.sleep(0.1)
    server.ask(CHAT, {"messages": HELLO, "max_tokens": 2})
    busy = (sum(main_process.cpu_times()[:2]) - spent) / (time.monotonic() - began)
    assert busy < 0.5  # of a core
    wait_until(lambda: main_process.num_fds() <= before + 5, 30)  # their ten seconds are over
    for half in halves:
        half.close()
    assert len(server.log) < 20_000
    assert server.call("GET", "/ready")[0] == 200


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


def test_sigterm_to_the_group_answers_what_is_drawn_and_refuses_what_waits(start: Callable[..., Any]) -> None:
    server = start()
    chat = server.send(CHAT, {"messages": HELLO, "max_tokens": 300, "ignore_eos": True, "n": 8})
    wait_until(lambda: server.metric("running_sequences") == 8)
    items = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(500)]
    evaluation = server.send(EVALUATE, {"items": items, "n": 32, "max_tokens": 2000})
    wait_until(lambda: server.metric("running_sequences") > 8)
    half = socket.create_connection(("127.0.0.1", server.port))
    half.sendall(b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    os.killpg(server.process.pid, signal.SIGTERM)
    assert error_of(_answer(evaluation), 503)["code"] == "shutting_down"
    status, answer = _answer(chat)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8 * 300)
    assert server.process.wait(120) == 1
    assert "refused" in server.log
    wait_until(lambda: not any(lives(process.pid) for process in server.family))


@pytest.mark.slow
def test_a_terminal_that_closes_lets_a_small_evaluation_finish(start: Callable[..., Any]) -> None:
    server = start()
    items = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(2)]
    evaluation = server.send(EVALUATE, {"items": items, "n": 8, "max_tokens": 500, "seed": 0})
    wait_until(lambda: server.metric("running_sequences") > 0)
    os.killpg(server.process.pid, signal.SIGHUP)
    status, answer = _answer(evaluation)
    assert status == 200, answer
    assert [len(item["samples"]) for item in answer["items"]] == [8, 8]
    assert server.process.wait(120) == 0


def test_a_stopped_worker_is_not_ready(server: Any) -> None:
    for name in ("generate", "score"):
        worker = server.worker(name)
        worker.suspend()
        try:
            wait_until(lambda: server.call("GET", "/ready")[0] == 503)
            assert server.call("GET", "/health")[0] == 200
        finally:
            worker.resume()
        wait_until(lambda: server.call("GET", "/ready")[0] == 200)


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
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 30}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: evil.example"], 403),
        (["Host: localhost", "Host: localhost"], 400),
        ([], 400),
        (["Host: localhost", "Origin: http://evil.example"], 403),
        (["Host: localhost", "Content-Type: text/plain"], 415),
        (["Host: localhost", "Content-Encoding: gzip"], 415),
        (["Host: localhost", f"Content-Length: {1 << 30}"], 413),
        (["Host: localhost", "Transfer-Encoding: gzip, chunked"], 501),
        (["Host: localhost", "Upgrade: h2c", "Connection: Upgrade", "Sec-Fetch-Site: cross-site"], 403),
    ],
)
def test_what_the_headers_show_is_refused_before_a_body_is_asked_for(
    server: Any, lines: list[str], status: int
) -> None:
    """And the connection is closed, because a client may send its body all the same."""
    defaults = ["Content-Type: application/json", "Content-Length: 100"]
    given = {line.partition(":")[0] for line in lines} | ({"Content-Length"} if status == 501 else set())
    head = [*lines, *(line for line in defaults if line.partition(":")[0] not in given), "Expect: 100-continue", "", ""]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall("\r\n".join([f"POST {CHAT} HTTP/1.1", *head]).encode())
        answer = read_all(connection)
    assert answer.startswith(f"HTTP/1.1 {status}".encode()), answer
    assert b"connection: close" in answer.lower()


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
        for offer in ("", "Connection: Upgrade\r\nUpgrade: h2c\r\n"):
            connection.sendall(f"{head}{offer}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
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
    page = server.exchange(f"GET {path} HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n".encode())
    for answer in (foreign, page):
        assert answer.startswith(b"HTTP/1.1 200" if path == "/health" else b"HTTP/1.1 403")


def test_curl_may_offer_http_2(server: Any, tmp_path: Path) -> None:
    """The same with bytes: `tests/serve/test_protocol.py`."""
    curl = shutil.which("curl")
    if curl is None or "HTTP2" not in subprocess.run([curl, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("there is no curl with HTTP/2 here")
    body = {"messages": [{"role": "user", "content": "1+1=" + "1" * 2000}], "max_tokens": 1}
    (tmp_path / "body.json").write_text(json.dumps(body))
    send = ["-H", "Content-Type: application/json", "-d", f"@{tmp_path / 'body.json'}", f"{server.address}{CHAT}"]
    options = ["-sS", "--http2", "-w", "%{http_code} %{http_version}\\n", "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [curl, *options, *send, "--next", *options, *send], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["200", "1.1"] * 2, "")


@pytest.fixture(scope="module")
def secured(start: Callable[..., Any], certificate: Path) -> Any:
    """A server with a certificate, names, an access log and a model name of its own."""
    files = ["--ssl-certfile", str(certificate / "cert.pem"), "--ssl-keyfile", str(certificate / "key.pem")]
    names = ["--host", "localhost", "--served-model-name", "adder", "--allowed-host", "a.example, b.example"]
    server = start(*files, *names, "--cors-origin", "https://page.example", "--access-log", api_key="secret-2")
    server.address = f"https://localhost:{server.port}"
    server.context = ssl.create_default_context(cafile=certificate / "cert.pem")
    return server


def test_it_speaks_tls_under_the_names_that_it_was_given(secured: Any) -> None:
    assert secured.call("GET", "/v1/models")[1]["data"][0]["id"] == "adder"
    secured.ask(CHAT, {"model": "adder", "messages": HELLO, "max_tokens": 1})
    secured.refusal(CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 1}, 404)
    for host, status in (("a.example", 200), ("B.example:443", 200), ("c.example", 403)):
        assert secured.call("GET", "/v1/models", headers={"Host": host})[0] == status
    assert f"https://localhost:{secured.port}" in secured.log


def test_connections_without_a_handshake_keep_nobody_out(secured: Any) -> None:
    """More than there is room for, at once; and their sockets are given back."""
    with contextlib.ExitStack() as silent:
        for _ in range(1100):
            silent.enter_context(socket.create_connection(("127.0.0.1", secured.port), timeout=60))
        assert secured.call("GET", "/v1/models")[0] == 200
    wait_until(lambda: psutil.Process(secured.process.pid).num_fds() < 200)
    assert secured.call("GET", "/v1/models")[0] == 200


def test_pages_that_may_use_the_server_can_read_what_it_says(secured: Any) -> None:
    allowed, foreign = {"Origin": "https://page.example"}, {"Origin": "https://evil.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    status, _, headers = secured.call("OPTIONS", CHAT, headers=allowed | preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://page.example")
    for key, expected in ((secured.key, 200), ("wrong", 401)):
        status, _, headers = secured.call("GET", "/v1/models", key=key, headers=allowed)
        assert (status, headers["access-control-allow-origin"]) == (expected, "https://page.example")
    status, answer, headers = secured.call("OPTIONS", CHAT, headers=foreign | preflight)
    assert error_of((status, answer), 403)["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in headers
    assert secured.call("GET", "/v1/models", headers=foreign)[0] == 403


def test_requests_have_ids_and_lines_in_the_log(secured: Any) -> None:
    assert secured.call("GET", "/v1/models", headers={"X-Request-ID": "mine-1"})[2]["x-request-id"] == "mine-1"
    made = secured.call("GET", "/v1/nothing", headers={"X-Request-ID": "two words \t"})[2]["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    wait_until(lambda: made in secured.log)
    lines = [json.loads(line) for line in secured.log.splitlines() if line.startswith("{")]
    by_id = {line["request_id"]: line for line in lines}
    assert (by_id["mine-1"]["method"], by_id["mine-1"]["path"], by_id["mine-1"]["status"]) == ("GET", "/v1/models", 200)
    assert by_id[made]["status"] == 404
    assert set(by_id[made]) == {"time", "request_id", "client", "method", "path", "status", "seconds"}
    assert secured.key not in secured.log


def test_a_full_disk_stops_no_request(secured: Any) -> None:
    """Here a log that may not grow."""
    process = psutil.Process(secured.process.pid)
    usual = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (len(secured.log.encode()), usual[1]))
    try:
        for _ in range(5):
            assert secured.call("GET", "/v1/models")[0] == 200
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, usual)
    assert secured.call("GET", "/v1/models", headers={"X-Request-ID": "with-room"})[0] == 200
    wait_until(lambda: "with-room" in secured.log and "lines were left out" in secured.log)
    assert "Traceback" not in secured.log
    assert '"path": "/v1/models"' in next(line for line in secured.log.splitlines() if "with-room" in line)
