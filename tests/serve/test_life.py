"""Deadlines, queues, disconnects, signals and dead workers, against real processes."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from tests.process_list import lives
from tests.serve.bodies import CHAT, EVALUATE, HELLO, SCORE
from tests.serve.conftest import ROOT, wait_until

LONG = {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True}


def _post(server: Any, body: dict[str, Any], path: str = CHAT) -> http.client.HTTPConnection:
    """A request whose answer nobody has read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {server.key}"} if server.key else {})
    connection.request("POST", path, json.dumps(body), headers)
    return connection


MANY = {"items": [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(200)], "n": 64, "max_tokens": 4000}


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {**LONG, "n": 8}), (CHAT, {**LONG, "n": 8, "stream": True}), (EVALUATE, MANY)],
    ids=["whole", "stream", "evaluation"],
)
def test_a_client_that_hangs_up_frees_its_places(server: Any, path: str, body: dict[str, Any]) -> None:
    wait_until(server.is_idle)
    connection = _post(server, body, path)
    if body.get("stream"):
        connection.getresponse().read(200)
    wait_until(lambda: server.metric("running_sequences") >= 8)
    drawn = server.metric("generated_tokens_total")
    connection.close()
    wait_until(server.is_idle)
    assert server.metric("generated_tokens_total") - drawn < 8 * 4000


def test_a_full_queue_is_429_and_a_waiting_request_gets_its_turn(narrow: Any) -> None:
    first = _post(narrow, {**LONG, "n": 64, "stream": True, "max_tokens": 1000})
    wait_until(lambda: narrow.metric("running_sequences") == 2)
    second = _post(narrow, {**LONG, "stream": True})
    wait_until(lambda: narrow.metric("waiting_requests") == 1)
    status, answer, headers = narrow.call("POST", CHAT, {"messages": HELLO})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1
    assert second.getresponse().readline().startswith(b"data:")  # as soon as one of the 64 has ended
    narrow.ask(CHAT, {"messages": HELLO, "max_tokens": 2})
    for connection in (first, second):
        connection.close()
    wait_until(narrow.is_idle)


def test_what_is_not_done_by_the_deadline_is_504_and_a_stream_that_is_cut_raises(crowded: Any) -> None:
    def read() -> None:
        stream = crowded.openai().chat.completions.create(
            model="tiny", messages=HELLO, n=64, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match="not finished within"):
            for _ in stream:
                pass

    wait_until(crowded.is_idle)
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        # a tiny model may be quick: ask for more completions than it draws in two seconds, two at a time
        asked = threads.submit(crowded.refusal, CHAT, {**LONG, "n": 64}, 504)
        threads.submit(read).result()
    assert asked.result()["code"] == crowded.refusal(EVALUATE, MANY, 504)["code"] == "deadline_exceeded"
    assert time.monotonic() - began > 1.5
    wait_until(crowded.is_idle)


def test_reward_bombs_end_with_their_status_and_others_go_on(server: Any) -> None:
    bombs = [
        r"9^{9^{9^9}}",
        r"9^{9^{9^9}}+1",
        r"(x+y+2)^{2000}",
        "1" * 10**6,
        "(" * 50_000,
        r"\frac{1}{" * 2000 + "}" * 2000,
    ]
    bombs += [r"\begin{pmatrix}" + "1&" * 20_000 + r"\end{pmatrix}", "\0", "\u202e5", r"__import__('os').system('x')"]
    items = [{"completion": rf"\boxed{{{bomb}}}", "answer": "5"} for bomb in bombs]
    items += [{"completion": "\ud800 no box", "answer": "5"}, {"completion": r"\boxed{5}", "answer": "5"}]
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(server.post, SCORE, {"items": items})
        quick = threads.submit(server.post, SCORE, {"items": items[-1:]})
        assert quick.result()[1]["items"][0]["correct"] is True
        status, answer = slow.result()
    assert status == 200, answer
    verdicts = answer["items"]
    assert [v["rewards"]["math"]["value"] for v in verdicts[:-1]] == [0.0] * (len(items) - 1)
    assert verdicts[-1]["correct"] is True
    assert verdicts[0]["status"] in ("timeout", "killed", "too_long", "wrong")
    assert verdicts[3]["status"] == "too_long"
    assert verdicts[-2]["status"] == "no_answer"
    assert server.call("GET", "/ready")[0] == 200
    assert server.metric("reward_statuses_total") > 0


def test_a_gold_answer_that_cannot_be_read_is_no_zero(server: Any) -> None:
    items = [{"completion": r"\boxed{5}", "answer": ""}, {"completion": r"\boxed{5}", "answer": "5"}]
    answer = server.ask(SCORE, {"items": items, "group": True})
    assert answer["items"][0]["status"] == "bad_gold"
    assert answer["items"][0]["correct"] is None
    assert answer["items"][0]["rewards"]["math"]["value"] is None
    assert answer["items"][0]["value"] is None  # the format is fine, but that is no judgement of the answer
    assert answer["items"][0]["advantage"] is None
    assert answer["items"][1]["value"] > 0
    assert answer["group"]["scored"] == 1


@pytest.mark.slow
def test_memory_and_buffers_stay_flat_over_many_requests(server: Any) -> None:
    worker, front = server.worker("generate"), server.worker("http")

    def some(count: int) -> None:
        with ThreadPoolExecutor(4) as threads:
            for status, _ in threads.map(
                lambda i: server.post(CHAT, {"messages": HELLO, "max_tokens": 2, "seed": i}),
                range(count),
            ):
                assert status == 200

    some(100)
    before = [p.memory_info().rss for p in (worker, front)]
    some(300)
    for process, rss in zip((worker, front), before, strict=True):
        assert process.memory_info().rss < rss * 1.05 + (4 << 20)
    assert server.is_idle()


def test_sigterm_under_load_finishes_what_is_in_flight(start: Callable[..., Any]) -> None:
    server = start()
    body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "n": 3}
    connections = [_post(server, {**body, "stream": i % 2 == 0}) for i in range(4)]
    wait_until(lambda: server.metric("running_sequences") == 12)
    server.process.send_signal(signal.SIGTERM)
    for i, connection in enumerate(connections):
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200
        if i % 2 == 0:
            assert text.endswith("data: [DONE]\n\n")
            assert text.count('"finish_reason":"length"') == 3
        else:
            assert json.loads(text)["usage"]["completion_tokens"] == 3 * 400
    assert server.process.wait(60) == 0
    wait_until(lambda: not any(lives(process.pid) for process in server.family))
    with pytest.raises(OSError, match="refused"):
        _post(server, body)


@pytest.mark.slow
def test_a_terminal_that_closes_lets_a_small_evaluation_finish(start: Callable[..., Any]) -> None:
    server = start()
    items = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(2)]
    evaluation = _post(server, {"items": items, "n": 8, "max_tokens": 500, "seed": 0}, EVALUATE)
    wait_until(lambda: server.metric("running_sequences") > 0)
    os.killpg(server.process.pid, signal.SIGHUP)
    answer = evaluation.getresponse()
    assert answer.status == 200
    assert [len(item["samples"]) for item in json.loads(answer.read())["items"]] == [8, 8]
    assert server.process.wait(120) == 0
    wait_until(lambda: not any(lives(process.pid) for process in server.family))


@pytest.mark.parametrize(("which", "path"), [("generate", CHAT), ("score", SCORE)])
def test_beside_a_stopped_worker_others_are_answered_and_its_requests_end_in_time(
    crowded: Any, which: str, path: str
) -> None:
    body = {"messages": HELLO, "max_tokens": 2} if path == CHAT else {"items": [{"completion": "1", "answer": "1"}]}
    wait_until(crowded.is_idle)
    worker = crowded.worker(which)
    worker.suspend()
    try:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(crowded.refusal, path, body, 504)
            began = time.monotonic()
            assert crowded.call("GET", "/health")[0] == 200
            assert time.monotonic() - began < 1.0
        assert asked.result()["code"] == "deadline_exceeded"
    finally:
        worker.resume()
    crowded.ask(path, body)


@pytest.mark.slow
def test_a_full_disk_under_the_output_stops_no_request(export: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "serve", "--model", str(export), "--port", str(port)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=full)
    server = SimpleNamespace(port=port, key=None)
    try:
        wait_until(lambda: _status(port, "/ready") == 200)
        assert _post(server, {"messages": HELLO, "max_tokens": 2}).getresponse().status == 200
        assert _post(server, {"messages": []}).getresponse().status == 400
    finally:
        process.terminate()
        assert process.wait(60) == 0


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0


@pytest.mark.slow
def test_signals_that_interrupt_one_another_end_the_server_once(start: Callable[..., Any]) -> None:
    server = start()
    for i in range(2000):
        if server.process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.process.pid, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[i % 3])
    assert server.process.wait(60.0) == 0


@pytest.mark.parametrize("which", ["generate", pytest.param("score", marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_server_and_everyone_hears_of_it(start: Callable[..., Any], which: str) -> None:
    server = start("--deadline", "30")
    connection = _post(server, {**LONG, "n": 8})
    stream = server.openai().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    statuses: list[int] = []
    polling = threading.Thread(target=_poll_ready, args=(server, statuses))
    polling.start()
    server.worker(which).kill()
    answer = connection.getresponse()
    assert answer.status == 503
    assert json.loads(answer.read())["error"]["code"] == "worker_lost"
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    assert server.process.wait(60) != 0
    polling.join()
    assert 503 in statuses
    wait_until(lambda: not any(lives(process.pid) for process in server.family))


@pytest.mark.slow
def test_when_the_main_process_is_killed_no_worker_stays(start: Callable[..., Any]) -> None:
    server = start()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    manager = server.worker("manager")  # the process of LitServe's queues stays, which docs/serving.md says
    wait_until(lambda: not any(lives(process.pid) for process in server.family if process.pid != manager.pid))
    manager.kill()


def _poll_ready(server: Any, statuses: list[int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            statuses.append(server.call("GET", "/ready", timeout=10)[0])
            time.sleep(0.02)
