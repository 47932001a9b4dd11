"""The server against the in-process engine, over loopback: ``python benchmarks/serve.py`` prints JSON.

The model has the quickstart's architecture, random weights and a context of 512 tokens. Speed does not depend on the
weights, because end tokens are ignored and every completion has the same length.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import parser_of, publish, surroundings
from rewards import batch
from server import PROMPT, Server, build_export, running, seconds_of_draws

from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer

CLIENTS, SAMPLES, TOKENS = 4, 8, 256
STREAMS = 8


def engine_rate(policy: Any, prompt_ids: list[int]) -> float:
    """Tokens per second of one rollout with as many rows as all clients ask for together."""
    seconds = seconds_of_draws(policy, [prompt_ids] * CLIENTS, group=SAMPLES, tokens=TOKENS)
    return CLIENTS * SAMPLES * TOKENS / seconds


def server_rate(server: Server, requests: int) -> float:
    """Tokens per second over ``requests`` from each client."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "n": SAMPLES, "max_tokens": TOKENS, "ignore_eos": True}

    def client(number: int) -> int:
        connection = server.connect()
        answers = [server.post(connection, "/v1/chat/completions", {**body, "seed": number}) for _ in range(requests)]
        return sum(answer["usage"]["completion_tokens"] for answer in answers)

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as threads:
        tokens = sum(threads.map(client, range(CLIENTS)))
    return tokens / (time.perf_counter() - began)


def first_token_ms(server: Server, rounds: int) -> list[float]:
    """Milliseconds to the first token, with ``STREAMS`` clients that stream one completion after the other."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}

    def client(_: int) -> list[float]:
        times = []
        for _ in range(rounds):
            connection = server.connect()
            began = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            while True:
                line = answer.readline()
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    break
            times.append((time.perf_counter() - began) * 1000)
            answer.read()
            connection.close()
        return times

    with ThreadPoolExecutor(STREAMS) as threads:
        return [ms for times in threads.map(client, range(STREAMS)) for ms in times]


def grpo_batch(seed: int, pairs: int) -> list[dict[str, str]]:
    """Items as in a rollout: 16 completions of about 800 characters per problem, made by benchmarks/rewards.py."""
    texts, golds = batch(seed, prompts=pairs // 16, group=16)
    return [{"completion": text, "answer": gold} for text, gold in zip(texts, golds, strict=True)]


def score_rate(server: Server, pairs: int, *, seed: int, part: int = 64) -> float:
    """Pairs per second of ``/v1/score`` over two connections; each ``seed`` makes pairs that are not cached yet."""
    items = grpo_batch(seed, pairs)
    parts = [items[i : i + part] for i in range(0, len(items), part)]

    def client(mine: list[list[dict[str, str]]]) -> int:
        connection = server.connect()
        return sum(len(server.post(connection, "/v1/score", {"items": some})["items"]) for some in mine)

    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        scored = sum(threads.map(client, [parts[::2], parts[1::2]]))
    return scored / (time.perf_counter() - began)


def memory_growth(server: Server, requests: int) -> dict[str, Any]:
    """Resident memory after a fifth of the requests, when all parts have been used once, and after all requests."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "n": 2, "max_tokens": 8}
    score = {"items": [{"completion": r"\boxed{632}", "answer": "632"}]}
    counter = iter(range(requests))
    lock = threading.Lock()
    marks: dict[int, dict[str, float]] = {}

    def client(_: int) -> None:
        connection = server.connect()
        while True:
            with lock:
                number = next(counter, None)
            if number is None:
                return
            if number == requests // 5:
                marks[number] = server.rss_mb()
            if number % 5 == 4:
                server.post(connection, "/v1/score", score)
            else:
                server.post(connection, "/v1/chat/completions", {**body, "seed": number})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(client, range(4)))
    before, after = marks[requests // 5], server.rss_mb()
    growth = {name: round(100 * (after[name] / before[name] - 1), 2) for name in before}
    return {"requests": requests, "before_mb": _rounded(before), "after_mb": _rounded(after), "growth_percent": growth}


def _ninth(values: list[float]) -> float:
    return sorted(values)[len(values) * 9 // 10]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


def medians(measure: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs each measurement ``rounds`` times, in turns, so that times of high load affect all of them."""
    values: dict[str, list[float]] = {name: [] for name in measure}
    for _ in range(rounds):
        for name, run in measure.items():
            values[name].append(run())
    return values


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-requests", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # as in the server's worker
    with tempfile.TemporaryDirectory() as temporary:
        model = build_export(Path(temporary) / "quickstart" / "export")
        policy = PolicyConfig(path=str(model))
        tokenizer = load_tokenizer(policy)
        engine = load_model(policy, tokenizer)
        ids = list(tokenizer(PROMPT).input_ids)
        with running(model) as server:
            engine_rate(engine, ids)
            server_rate(server, 1)
            rates = medians(
                {"engine": lambda: engine_rate(engine, ids), "server": lambda: server_rate(server, 2)}, args.rounds
            )
            ratios = [s / e for s, e in zip(rates["server"], rates["engine"], strict=True)]
            times = first_token_ms(server, args.rounds)
            pairs = [score_rate(server, args.pairs, seed=seed) for seed in range(args.rounds)]
            memory = memory_growth(server, args.memory_requests)
            ready = {"wall": round(server.ready_s, 1), "cpu": round(server.ready_cpu_s, 1)}
    result = {
        "benchmark": "serve",
        **surroundings("cpu"),
        "ready_s": ready,
        "tokens_per_s": {name: round(statistics.median(values)) for name, values in rates.items()},
        "server_over_engine": {"median": round(statistics.median(ratios), 3), "all": [round(r, 3) for r in ratios]},
        "first_token_ms": {"p50": round(statistics.median(times), 1), "p90": round(_ninth(times), 1)},
        "score_pairs_per_s": {"median": round(statistics.median(pairs)), "all": [round(p) for p in pairs]},
        "memory": memory,
    }
    publish(result, args.output)


if __name__ == "__main__":
    main()
