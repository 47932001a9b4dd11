"""The client of ``/v1/evaluate`` before a server that is full."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from serve.client import post


@pytest.fixture
def full_once() -> Iterator[Callable[[str | None], tuple[str, list[float]]]]:
    """``full_once("5")``: the address of a server whose first answer is 429 with that ``Retry-After``, and when it was
    asked."""
    servers = []

    def start(header: str | None) -> tuple[str, list[float]]:
        asked: list[float] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                asked.append(time.time())
                self.send_response(429 if len(asked) == 1 else 200)
                if header is not None and len(asked) == 1:
                    self.send_header("Retry-After", header)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/v1/evaluate", asked

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


Start = Callable[[str | None], tuple[str, list[float]]]


def test_a_full_server_may_say_until_when(full_once: Start) -> None:
    until = int(time.time()) + 2
    url, asked = full_once(formatdate(until, usegmt=True))
    assert post(url, {}, api_key=None) == {}
    assert len(asked) == 2 and asked[1] >= until


def test_else_it_is_asked_again_after_a_second_and_never_at_once(full_once: Start) -> None:
    least = dict.fromkeys([None, "nan", "-5", "soon", "Sun, 99 Mar 2025 12:00:07 GMT", "1"], 0.99)
    least |= {"0": 0.09, "Thu, 01 Jan 1970 00:00:00 GMT": 0.09}

    def ask(header: str | None) -> list[float]:
        url, asked = full_once(header)
        assert post(url, {}, api_key=None) == {}
        return asked

    with ThreadPoolExecutor(len(least)) as threads:
        for (header, pause), asked in zip(least.items(), threads.map(ask, least), strict=True):
            assert len(asked) == 2 and asked[1] - asked[0] >= pause, header
