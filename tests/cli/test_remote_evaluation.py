"""The client of ``/v1/evaluate`` before a server that is full."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from grpo_pl.cli import remote_evaluation
from grpo_pl.openai_format.retry_after import LONGEST_WAIT_S

LATER = dict.fromkeys([None, "nan", "-5", "soon", "Sun, 99 Mar 2025 12:00:07 GMT", "1"], 1.0)
LATER |= {"5": 5.0, "0": 0.1, "Thu, 01 Jan 1970 00:00:00 GMT": 0.1, "Fri, 31 Dec 9999 23:59:59 GMT": LONGEST_WAIT_S}
"""``Retry-After`` -> seconds before the next request."""


@pytest.fixture
def full_once() -> Iterator[tuple[str, list[str | None]]]:
    """The address of a server that answers 429 for each ``Retry-After`` in a list, and then 200."""
    headers: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(429 if headers else 200)
            if headers and (header := headers.pop()) is not None:
                self.send_header("Retry-After", header)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/evaluate", headers
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("header", LATER, ids=str)
def test_a_full_server_is_asked_again_when_it_says_else_after_a_second_and_never_at_once(
    full_once: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch, header: str | None
) -> None:
    url, headers = full_once
    headers.append(header)
    slept: list[float] = []
    monkeypatch.setattr(remote_evaluation, "sleep", slept.append)
    assert remote_evaluation.post(url, {}, api_key=None) == {}
    assert slept == [LATER[header]]
