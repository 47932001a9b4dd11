"""One server under load that no honest client makes: how soon others are answered meanwhile."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.hostile_cases import SCORE, post

SOON_S = 5.0
"""Generous for a busy machine; what this file keeps from coming back took ten seconds to minutes."""
BOMBS = (r"9^{9^{9^{%d}}}+1", r"((%d!)!)!", r"(x+y+%d)^{2000}", r"\binom{10^9}{5\cdot10^8}+%d")
GOLDS = (r"\prod_{i=1}^{10^9} i", r"\sum_{i=1}^{10^9} \frac{1}{i^2+i+1}", "99999999!", r"\binom{10^{10}}{5\cdot10^9}")


@pytest.fixture(scope="module")
def busy(start: Callable[..., Any]) -> Any:
    return start("--deadline", "120")


def _send(server: Any, path: str, body: Any) -> socket.socket:
    """A request whose answer nobody reads."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(post(path, json.dumps(body).encode()))
    return connection


def _bombs(server: Any, first: int) -> list[socket.socket]:
    items = [{"completion": rf"\boxed{{{BOMBS[i % 4] % (i + 9)}}}", "answer": "5"} for i in range(first, first + 30)]
    return [_send(server, SCORE, {"items": [item]}) for item in items]


def _honest_score(server: Any) -> float:
    """Seconds until an answer that takes algebra is judged."""
    began = time.monotonic()
    unknown = time.time_ns() % 10**9  # no verdict is remembered
    status, answer = server.post(SCORE, {"items": [{"completion": rf"\boxed{{{unknown}+x}}", "answer": "x+1"}]})
    assert (status, answer["items"][0]["status"]) == (200, "wrong"), answer
    return time.monotonic() - began


def test_a_score_does_not_wait_for_the_bombs_of_others(busy: Any) -> None:
    bombs = _bombs(busy, 0)
    time.sleep(0.5)
    assert max(_honest_score(busy) for _ in range(3)) < SOON_S
    for bomb in bombs:
        bomb.close()
    time.sleep(0.1)
    assert _honest_score(busy) < SOON_S
    assert busy.call("GET", "/ready")[0] == 200


def test_nor_for_those_of_clients_who_have_gone(busy: Any) -> None:
    bombs = _bombs(busy, 100)
    time.sleep(0.5)
    for bomb in bombs:
        bomb.close()
    began = time.monotonic()
    assert _honest_score(busy) < SOON_S
    while not busy.is_idle():  # nothing goes on for them
        time.sleep(0.05)
        assert time.monotonic() - began < SOON_S


def test_nor_for_a_request_of_a_thousand_items(busy: Any) -> None:
    items = [{"completion": rf"\boxed{{x^{{{i}}}+{i}}}", "answer": "x+1"} for i in range(1000)]
    large = _send(busy, SCORE, {"items": items})
    time.sleep(0.5)
    assert max(_honest_score(busy) for _ in range(3)) < SOON_S
    large.close()


@pytest.mark.parametrize("gold", [GOLDS[0], *(pytest.param(gold, marks=pytest.mark.slow) for gold in GOLDS[1:])])
def test_a_gold_answer_that_is_a_bomb_costs_one_time_limit(busy: Any, gold: str) -> None:
    def score(first: int) -> float:
        items = [{"completion": rf"\boxed{{{first + i}+x}}", "answer": gold} for i in range(48)]
        began = time.monotonic()
        status, answer = busy.post(SCORE, {"items": [*items, {"completion": "no box", "answer": gold}]})
        assert status == 200, answer
        assert {(item["value"], item["status"]) for item in answer["items"]} == {(None, "bad_gold")}
        return time.monotonic() - began

    assert score(0) < 20.0  # there are 49 answers, each of which took a second or more
    assert score(100) < 1.0  # it is known
