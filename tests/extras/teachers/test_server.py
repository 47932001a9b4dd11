"""Log-probabilities from a server that speaks OpenAI's completions, and what is wrong with one that does not."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from grpo_pl.extras.teachers import server
from grpo_pl.extras.teachers.server import served_logprobs
from grpo_pl.policy.teacher import TeacherConfig

ROWS = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [5, 5]]
Reply = Callable[[dict[str, Any], int], tuple[int, Any]]


@contextmanager
def _serving(reply: Reply, retry_after: str = "0") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server, and the requests that it has got; ``reply(body, number)`` gives status and answer."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
            status, answer = reply(body, len(asked))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Retry-After", retry_after)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1", asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _told(body: dict[str, Any], number: int) -> tuple[int, Any]:
    """Minus the token's id over ten, choices in reverse order."""
    choices = [
        {"index": i, "text": "", "logprobs": {"token_logprobs": [None, *(-token / 10 for token in row[1:])]}}
        for i, row in enumerate(body["prompt"])
    ]
    return 200, {"choices": choices[::-1]}


def _config(url: str, **fields: Any) -> TeacherConfig:
    return TeacherConfig(**{"path": "big", "url": url, "rows_per_request": 3, "retries": 1} | fields)


def test_every_row_has_its_own_whatever_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with _serving(_told) as (url, asked):
        found = served_logprobs(_config(url, api_key_variable="TEACHER_KEY"), ROWS)
    assert found == [[-token / 10 for token in row[1:]] for row in ROWS]
    assert sorted(len(body["prompt"]) for body in asked) == [1, 3]
    for body in asked:
        assert (body["path"], body["key"], body["model"]) == ("/v1/completions", "Bearer secret", "big")
        assert (body["echo"], body["logprobs"], body["max_tokens"], body["temperature"]) == (True, 0, 0, 1.0)


def test_nothing_is_asked_about_no_rows() -> None:
    with _serving(_told) as (url, asked):
        assert served_logprobs(_config(url), []) == []
    assert not asked


def test_a_busy_server_is_asked_again_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy_once(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return (503, {"error": "loading"}) if number == 1 else _told(body, number)

    waited: list[float] = []
    monkeypatch.setattr(server, "sleep", waited.append)  # not time.sleep, by which other threads wait as well
    until = formatdate(time.time() + 50, usegmt=True)
    with _serving(busy_once, retry_after=until) as (url, asked):
        assert len(served_logprobs(_config(url, served_name="other"), ROWS[:2])) == 2
    assert [body["model"] for body in asked] == ["other", "other"]
    assert len(waited) == 1 and 30 < waited[0] <= 50


@pytest.mark.parametrize(
    ("status", "answer", "match", "requests"),
    [
        (404, {"error": {"message": "no model big"}}, "answered 404: .*no model big", 1),
        (500, {"error": "down"}, "answered 500", 2),
        (200, {"choices": [{"index": 0, "text": "hi"}]}, "no log-probabilities of its prompt .*`echo`", 1),
        (
            200,
            {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, -1]}}]},
            r"returned \[1\] .* for \[2\]",
            1,
        ),
        (200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, -1, None]}}]}, "no log-probabilities", 1),
        (200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, -1, -1e999]}}]}, "not finite", 1),
    ],
)
def test_what_is_no_answer_is_said_in_one_line(status: int, answer: Any, match: str, requests: int) -> None:
    with (
        _serving(lambda body, number: (status, answer)) as (url, asked),
        pytest.raises(ValueError, match=match) as error,
    ):
        served_logprobs(_config(url), ROWS[:1])
    assert "\n" not in str(error.value) and url in str(error.value)
    assert len(asked) == requests


def test_a_server_that_is_not_there_is_named() -> None:
    with _serving(_told) as (url, _):
        pass
    with pytest.raises(ValueError, match="cannot be reached"):
        served_logprobs(_config(url, retries=0), ROWS)
