"""The servers that other people's clients ask, which run already: `.ci/clients` starts them and names them here."""

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

LONG = {"max_tokens": 3000, "ignore_eos": True}
"""Fields of a completion that takes a while."""


@pytest.fixture(scope="session")
def servers() -> dict[str, str]:
    """The addresses of ``server``, of a ``narrow`` one with two slots and one place in its queue, and of one that
    speaks HTTP by ``h11``; and the ``key`` of all."""
    if "GRPO_PL_SERVERS" not in os.environ:
        pytest.skip("`bash .ci/clients` starts the servers")
    return dict(json.loads(os.environ["GRPO_PL_SERVERS"]))


@pytest.fixture(scope="session")
def base_url(servers: dict[str, str]) -> str:
    return servers["server"] + "/v1"


@pytest.fixture(scope="session")
def key(servers: dict[str, str]) -> str:
    return servers["key"]


def _metric(address: str, key: str, name: str) -> float:
    request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return float(next(line for line in answer.read().decode().splitlines() if line.startswith(name)).split()[-1])


def _wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def wait_until_idle(servers: dict[str, str]) -> Callable[..., None]:
    """Returns once a server draws nothing any more, long before it would be done with 64 long completions."""

    def wait(server: str = "server") -> None:
        _wait_until(lambda: _metric(servers[server], servers["key"], "grpo_pl_running_sequences") == 0, 5.0)

    return wait


@pytest.fixture
def full(servers: dict[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a server whose slots and queue are taken, and what makes room in it."""
    address, key = servers["narrow"], servers["key"]
    body = json.dumps({"prompt": "1+1=", "n": 2, **LONG, "stream": True})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with ExitStack() as taken:
        for count, name in [(2, "grpo_pl_running_sequences"), (1, "grpo_pl_waiting_requests")]:
            connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
            taken.callback(connection.close)
            connection.request("POST", "/v1/completions", body, headers)
            _wait_until(lambda name=name, count=count: _metric(address, key, name) == count)
        yield address + "/v1", taken.close
    _wait_until(lambda: _metric(address, key, "grpo_pl_running_sequences") == 0)
