"""One server under load that no honest client makes: how soon others are answered meanwhile."""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.bodies import CHAT, HELLO, SCORE, post
from tests.serve.hostile_cases import BOMBS, grammars

SOON_S = 10.0
"""Generous for a busy machine; what this file keeps from coming back took twenty seconds to minutes."""
GOLDS = (r"\prod_{i=1}^{10^9} i", r"\sum_{i=1}^{10^9} \frac{1}{i^2+i+1}", "99999999!", r"\binom{10^{10}}{5\cdot10^9}")


def _bombs(server: Any, first: int) -> list[socket.socket]:
    items = [{"completion": rf"\boxed{{{BOMBS[i % 4] % (i + 9)}}}", "answer": "5"} for i in range(first, first + 30)]
    return [server.send(SCORE, {"items": [item]}) for item in items]


def _honest_score(server: Any) -> float:
    """Seconds until an answer that takes algebra is judged."""
    began = time.monotonic()
    unknown = time.time_ns() % 10**9  # no verdict is remembered
    status, answer = server.post(SCORE, {"items": [{"completion": rf"\boxed{{{unknown}+x}}", "answer": "x+1"}]})
    assert (status, answer["items"][0]["status"]) == (200, "wrong"), answer
    return time.monotonic() - began


def test_a_score_does_not_wait_for_the_bombs_of_others(server: Any) -> None:
    bombs = _bombs(server, 0)
    time.sleep(0.5)
    assert max(_honest_score(server) for _ in range(3)) < SOON_S
    for bomb in bombs:
        bomb.close()
    time.sleep(0.1)
    assert _honest_score(server) < SOON_S
    assert server.call("GET", "/ready")[0] == 200


@pytest.mark.slow
def test_nor_for_those_of_clients_who_have_gone(server: Any) -> None:
    bombs = _bombs(server, 100)
    time.sleep(0.5)
    for bomb in bombs:
        bomb.close()
    began = time.monotonic()
    assert _honest_score(server) < SOON_S
    while not server.is_idle():  # nothing goes on for them
        time.sleep(0.05)
        assert time.monotonic() - began < SOON_S


@pytest.mark.slow
def test_nor_for_a_request_of_a_thousand_items(server: Any) -> None:
    items = [{"completion": rf"\boxed{{x^{{{i}}}+{i}}}", "answer": "x+1"} for i in range(1000)]
    with server.send(SCORE, {"items": items}):
        time.sleep(0.5)
        assert max(_honest_score(server) for _ in range(3)) < SOON_S


@pytest.mark.parametrize("gold", [GOLDS[0], *(pytest.param(gold, marks=pytest.mark.slow) for gold in GOLDS[1:])])
def test_a_gold_answer_that_is_a_bomb_costs_one_time_limit(server: Any, gold: str) -> None:
    def score(first: int) -> float:
        items = [{"completion": rf"\boxed{{{first + i}+x}}", "answer": gold} for i in range(48)]
        began = time.monotonic()
        answer = server.ask(SCORE, {"items": [*items, {"completion": "no box", "answer": gold}]})
        assert {(item["value"], item["status"]) for item in answer["items"]} == {(None, "bad_gold")}
        return time.monotonic() - began

    assert score(0) < 20.0  # there are 49 answers, each of which took a second or more
    assert score(100) < 1.0  # it is known


def _large(n: int, **more: Any) -> dict[str, Any]:
    return {"messages": HELLO, "n": n, "max_tokens": 4000, "ignore_eos": True, **more}


def _first_token(server: Any) -> float:
    """Seconds until an honest client has its first token."""
    began = time.monotonic()
    body = {"messages": HELLO, "max_tokens": 8, "ignore_eos": True, "stream": True}
    with server.send(CHAT, body) as connection:
        answer = b""
        while b"data:" not in answer:
            part = connection.recv(1 << 16)
            assert part, answer
            answer += part
    assert answer.startswith(b"HTTP/1.1 200")
    return time.monotonic() - began


def _health(server: Any) -> float:
    began = time.monotonic()
    assert server.call("GET", "/health")[0] == 200
    return time.monotonic() - began


def test_a_chat_does_not_wait_for_requests_that_fill_the_batch(server: Any) -> None:
    """Each place that becomes free goes to the request with fewest."""
    large = [server.send(CHAT, _large(64, stream=True, max_tokens=64)) for _ in range(20)]
    first, health = _first_token(server), _health(server)
    for request in large:
        request.close()
    assert first < SOON_S / 2
    assert health < 2.0


def test_grammars_that_cost_much_hurt_nobody_beside_them(server: Any) -> None:
    costly = [server.send(CHAT, {"messages": HELLO, "max_tokens": 64, **fields}) for _, fields, _ in grammars()]
    first, health = _first_token(server), _health(server)
    choice = server.ask(CHAT, {"messages": HELLO, "max_tokens": 8, "structured_outputs": {"choice": ["1", "22"]}})
    assert choice["choices"][0]["message"]["content"] in ("1", "22")
    for request in costly:
        request.close()
    assert first < SOON_S / 2
    assert health < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("queue", [256, 8])
def test_of_many_clients_each_gets_an_answer_or_is_told_when_to_come_back(
    start: Callable[..., Any], queue: int
) -> None:
    """More than there are slots; the queue has room for all of them, or not."""
    server = start("--max-queue", str(queue))
    todo, statuses = iter(range(600)), Counter[str]()

    async def ask(number: int) -> None:
        body = {"messages": HELLO, "max_tokens": 16, "seed": number, "stream": number % 2 == 0, "n": 1 + number % 3}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, json.dumps(body).encode()))
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        status = head.split()[1].decode()
        whole = b"[DONE]" if number % 2 == 0 else b'"usage"'
        if status == "429":
            assert b"\r\nretry-after: 1\r\n" in head.lower() + b"\r\n"
            await asyncio.sleep(1)
            await ask(number)
        assert status == "429" or whole in answer
        statuses[status] += 1

    async def client() -> None:
        for number in todo:
            await ask(number)

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(90)))

    asyncio.run(clients())
    assert statuses["200"] == 600
    assert (statuses["429"] > 0) == (queue == 8) and set(statuses) <= {"200", "429"}
