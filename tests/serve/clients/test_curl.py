"""curl, as scripts use it."""

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")]

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 20, "seed": 3}
PARTIAL_FILE, HTTP_ERROR, TIMED_OUT = 18, 22, 28  # exit statuses of curl


@pytest.fixture
def curl(base_url: str, key: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``curl(body, *options)``"""

    def run(body: Any, *options: str, url: str = base_url, key: str = key) -> subprocess.CompletedProcess[str]:
        headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
        command = ["curl", "-sS", f"{url}/chat/completions", *headers, "-d", "@-", *options]
        return subprocess.run(command, input=json.dumps(body), capture_output=True, text=True, timeout=120)

    return run


def _content(answer: str) -> str:
    return str(json.loads(answer)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("options", [[], ["-0"], ["--compressed"], ["--http1.1", "--no-keepalive"]], ids=str)
def test_a_chat_is_answered(curl: Callable[..., Any], options: list[str]) -> None:
    done = curl(CHAT, "--fail-with-body", *options)
    assert done.returncode == 0
    assert _content(done.stdout) == _content(curl(CHAT).stdout)


def test_a_large_body_is_sent_after_it_was_asked_for(curl: Callable[..., Any]) -> None:
    """curl sends ``Expect: 100-continue`` with a body of more than 1 MB."""
    long = CHAT | {"metadata": {"note": "x" * 1_500_000}}
    done = curl(long, "-v")
    assert "100 Continue" in done.stderr
    assert json.loads(done.stdout)["choices"] or json.loads(done.stdout)["error"]


def test_events_of_a_stream_are_lines(curl: Callable[..., Any]) -> None:
    done = curl(CHAT | {"stream": True}, "-N")
    *events, last, end = done.stdout.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    told = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(told) == _content(curl(CHAT).stdout)


@pytest.mark.parametrize(
    ("change", "options", "status"),
    [
        ({"model": "other"}, {}, "404"),
        ({"temperature": -1}, {}, "400"),
        ({}, {"key": "wrong"}, "401"),
    ],
)
def test_an_error_has_a_status_and_a_reason(
    curl: Callable[..., Any], change: Any, options: dict[str, str], status: str
) -> None:
    done = curl(CHAT | change, "--fail-with-body", "-w", "\n%{http_code}", **options)
    assert done.returncode == HTTP_ERROR
    told, found = done.stdout.rsplit("\n", 1)
    assert found == status and json.loads(told)["error"]["message"]


def test_a_full_server_is_asked_again(curl: Callable[..., Any], full: tuple[str, Callable[[], None]]) -> None:
    address, make_room = full
    assert curl(CHAT, "--fail", url=address).returncode == HTTP_ERROR
    make_room()
    assert curl(CHAT, "--fail", "--retry", "5", url=address).returncode == 0  # it heeds `Retry-After`


@pytest.mark.parametrize("stream", [False, True])
def test_running_out_of_time_leaves_no_work_behind(
    curl: Callable[..., Any], wait_until_idle: Callable[[], None], stream: bool
) -> None:
    long = CHAT | {"n": 64, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    assert curl(long, "--max-time", "0.5").returncode == TIMED_OUT
    wait_until_idle()


def test_an_offer_of_http_2_is_refused_with_the_reason_unless_h11_reads_it(
    curl: Callable[..., Any], servers: dict[str, str]
) -> None:
    """With the default parser the body of such a request is lost."""
    done = curl(CHAT, "--http2")
    assert json.loads(done.stdout)["error"]["code"] == "upgrade_not_supported"
    assert _content(curl(CHAT, "--http2", url=servers["h11"] + "/v1").stdout) == _content(curl(CHAT).stdout)
