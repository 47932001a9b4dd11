"""Runs whose servers are taken, hang, answer nonsense or are gone: each shows soon, and in one line."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any

import pytest

from grpo_pl.rollout.engine import EngineDied, RolloutInterrupted
from grpo_pl.rollout.remote import RemoteEngine
from grpo_pl.rollout.remote.client import EngineClient, InUse
from grpo_pl.rollout.remote.fleet import Fleet
from grpo_pl.types import GenerateRequest, SamplingParams

ABOUT = {"max_tokens": None, "dtype": None, "lease_s": 30.0, "reads_files": False}
Answer = Callable[[str], tuple[int, Any] | None]


@pytest.fixture
def listen() -> Iterator[Callable[[Answer], str]]:
    """``listen(answer)``: the address of a server that answers a method by status and JSON, or not until the end."""
    servers: list[ThreadingHTTPServer] = []
    over = threading.Event()

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                self.close_connection = True
                if not self.raw_requestline or not self.parse_request():
                    return
                found = answer(self.command)
                if found is None:
                    over.wait(300)
                    return
                body = json.dumps(found[1]).encode()
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(found[0])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def _draw(engine: RemoteEngine, model: Any, make_keys: Any, **options: Any) -> None:
    engine.generate(
        model,
        GenerateRequest(
            prompt_ids=[[1, 2]],
            keys=make_keys(1, 2),
            sampling=SamplingParams(max_completion_length=2),
            eos_token_ids=[6],
            pad_token_id=0,
        ),
        **options,
    )


def test_a_server_that_hangs_costs_others_no_lease(listen: Any) -> None:
    heard = threading.Semaphore(0)

    def answer(method: str) -> tuple[int, Any]:
        if method == "POST":
            heard.release()
        return 200, {}

    urls = listen(lambda method: None), listen(answer)
    fleet = Fleet([EngineClient(url, token=None, ca_file=None, silence_s=60.0) for url in urls], "1" * 32, 0.6, "0")
    for _ in range(5):
        assert heard.acquire(timeout=60)
    fleet.close()


class _Clock:
    """Time that passes while somebody sleeps."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _in_use(url: str, ends_in_s: float) -> InUse:
    refused = InUse(url)
    refused.url, refused.ends_in_s = url, ends_in_s
    return refused


def test_servers_whose_leases_end_one_after_the_other_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers take up to half a second."""
    clock = _Clock()
    monkeypatch.setattr("grpo_pl.rollout.remote.engine.time", clock)
    ends, delays = {"a": clock.now + 30.0, "b": clock.now + 60.0}, cycle((0.0, 0.5, 0.1))

    def ask() -> str:
        for url, end in ends.items():
            if (left := end - clock.now) > 0:
                clock.sleep(next(delays))
                raise _in_use(url, left)
        return "free"

    assert RemoteEngine(urls=["http://a:1", "http://b:1"])._patiently(ask) == "free"
    assert clock.now == pytest.approx(1060.0, abs=1.0)


def test_a_server_whose_run_is_heard_from_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr("grpo_pl.rollout.remote.engine.time", clock)

    def ask() -> None:  # it is heard from every ten seconds
        raise _in_use("a", 30.0 - (clock.now - 1000.0) % 10.0)

    with pytest.raises(InUse):
        RemoteEngine(urls=["http://a:1"])._patiently(ask)
    assert clock.now == pytest.approx(1010.0, abs=1.0)


def test_a_server_that_is_gone_is_waited_for_once(build_model: Any, make_keys: Any, caplog: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # nobody listens
        engine = RemoteEngine(urls=[f"http://127.0.0.1:{other.getsockname()[1]}"], reconnect_s=0.3)
        with pytest.raises(EngineDied, match=r"It was tried for 0\.3 s\.$"):
            _draw(engine, build_model("qwen2"), make_keys)
    assert "drawn again" not in caplog.text and caplog.text.count("It is tried again") == 1


@pytest.mark.parametrize("status", [500, 501])
def test_a_server_with_a_bug_is_not_waited_for(listen: Any, status: int) -> None:
    error = {"error": {"message": "internal error", "code": "internal"}}
    with pytest.raises(EngineDied, match=f"answers {status}: internal error"):
        RemoteEngine(urls=[listen(lambda method: (status, error))], reconnect_s=600).check()


@pytest.mark.parametrize("about", [{}, {"lease_s": 3.0}, []])
def test_the_answer_of_another_server_is_told_in_one_line(listen: Any, about: Any) -> None:
    with pytest.raises(EngineDied, match=r"the answer is that of another server\.$"):
        RemoteEngine(urls=[listen(lambda method: (200, about))]).check()


def test_a_run_that_is_told_to_stop_waits_for_no_server_that_hangs(
    listen: Any, build_model: Any, make_keys: Any
) -> None:
    asked = threading.Event()

    def answer(method: str) -> tuple[int, Any] | None:
        if method == "GET":
            return 200, ABOUT
        asked.set()
        return None

    engine = RemoteEngine(urls=[listen(answer)], silence_s=10_000.0)
    with pytest.raises(RolloutInterrupted):
        _draw(engine, build_model("qwen2"), make_keys, should_stop=asked.is_set)
    assert engine._should_stop is None
    engine.close()


def test_a_token_in_the_clear_is_warned_of(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_PL_ENGINE_TOKEN", "x" * 16)
    for url, warned in (("http://127.0.0.1:9", False), ("http://no.such.host.invalid:9", True)):
        caplog.clear()
        with pytest.raises(EngineDied):
            RemoteEngine(urls=[url], reconnect_s=0).check()
        assert ("unencrypted" in caplog.text) == warned
