"""The table of hostile requests against one server: the answers, and what is left behind."""

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve.server import _GIVE_BACK_S
from tests.serve.hostile_cases import CHAT, Case, cases, loads, post

CASES = cases()
SLOW = ("1,024 problems", "64 long completions")
"""Others of their kind are quicker."""


class Footprint:
    """What a server's processes hold."""

    def __init__(self, server: Any) -> None:
        self.processes = len(_family(server))  # one that was ended is started again by its next task
        self.memory = sum(_own_memory(p) for p in _family(server))
        self.descriptors = server.worker("http").num_fds()
        self.files = set(os.listdir(server.scratch))


def _family(server: Any) -> list[psutil.Process]:
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def _own_memory(process: psutil.Process) -> int:
    """Bytes of a process without those of files, of which more are its own whenever another program ends."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    told = re.search(r"^Pss_Anon:\s+(\d+) kB", rollup.read_text(), re.MULTILINE) if rollup.exists() else None
    return 1024 * int(told[1]) if told else int(process.memory_info().rss)


@pytest.fixture(scope="module")
def footprints(server: Any) -> Any:
    """Before the table; taken after one request of each kind has warmed the server up."""
    for body in ({"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}, {}):
        server.exchange(post(CHAT, json.dumps(body).encode()))
    return Footprint(server)


def test_the_table_is_long_and_no_case_is_there_twice() -> None:
    assert len(CASES) >= 100
    assert len({hash(case.request) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case.name in SLOW)) for case in CASES],
    ids=[re.sub(r"\W+", "-", case.name)[:60] for case in CASES],
)
def test_a_hostile_request_is_answered_as_one(server: Any, footprints: Footprint, case: Case) -> None:
    answer = server.exchange(case.request)
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    assert status in case.statuses, answer[:500]
    if status >= 400 and b"content-type: text/plain" not in head:  # uvicorn's own, for what is not HTTP
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 1000
        assert not re.search(r"sys\.|Error\b|instance of|codec|NoneType|<class", error["message"]), error["message"]


@pytest.mark.parametrize(("name", "requests"), list(loads()), ids=lambda value: value if isinstance(value, str) else "")
def test_others_are_answered_beside_clients_that_read_nothing(
    server: Any, footprints: Footprint, name: str, requests: list[bytes]
) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in requests]
    for connection, request in zip(connections, requests, strict=True):
        connection.sendall(request)
    for path in ("/health", "/ready", "/metrics"):
        assert server.call("GET", path)[0] == 200
    hello = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}
    server.ask(CHAT, hello)
    time.sleep(0.25)
    for connection in connections:
        connection.close()


def test_nothing_of_the_table_is_left(server: Any, footprints: Footprint) -> None:
    end = time.monotonic() + 40
    while True:
        now = Footprint(server)
        clean = (
            now.processes <= footprints.processes
            and now.memory < footprints.memory + (1 << 30)  # once, by all threads; asked again it takes no more
            and now.descriptors <= footprints.descriptors + 10  # each thread connects to LitServe's queues once
            and now.files == footprints.files
            and server.is_idle()
        )
        if clean or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert clean, (vars(footprints), vars(now))
    assert server.call("GET", "/ready")[0] == 200
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_the_table_asked_again_takes_no_more_memory(server: Any) -> None:
    """What large bodies took is used again, by whichever thread parses the next one."""
    held = []
    for _ in range(3):
        for case in CASES:
            server.exchange(case.request)
        time.sleep(_GIVE_BACK_S + 2)
        held.append(_own_memory(server.worker("http")) >> 20)
    assert held[2] - held[0] < 10, held
