"""Compares many concurrent streams with the in-process engine: ``python benchmarks/streams.py`` prints JSON.

Each client streams completions of 32 tokens, one after another. All clients run in another process on the same machine,
so their work slows the server. The engine decodes as many rows of the same length, alone. ``--busy 1`` runs one more
process that keeps a core busy. ``--before CHECKOUT --streams 1 16 64 128`` compares this server with that of another
checkout instead, by turns, and tells the medians of ``--rounds``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from common import parser_of, publish, surroundings
from server import PROMPT, Server, build_export, seconds_of_draws

from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer

TOKENS = 32
BODY = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}


class _Client(asyncio.Protocol):
    """Streams one completion after another over one connection; records the time of each first token, and tokens.

    It parses nothing else of an answer, because its work slows the server on the same machine.
    """

    def __init__(self, port: int, number: int, until: float, first: list[float], tokens: list[int]) -> None:
        self._port, self._number, self._until, self._first, self._tokens = port, number, until, first, tokens
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        body = json.dumps({**BODY, "seed": self._number * 100_000 + self._request}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
        self._request, self._seen, self._waiting = self._request + 1, b"", True
        self._began = time.perf_counter()
        self._transport.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if self._waiting and _FIRST_TOKEN.search(self._seen):
            self._first.append(time.perf_counter() - self._began)
            self._waiting = False
        if not self._seen.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            return
        if not self._seen.startswith(b"HTTP/1.1 200 ") or b'"finish_reason":"length"' not in self._seen:
            self._end(RuntimeError(f"answered {self._seen[:200]!r}"))
            return
        self._tokens.append(TOKENS)  # with `ignore_eos` a completion that has its full length
        if time.perf_counter() < self._until:
            self._ask()
        else:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or RuntimeError("the server closed the connection in the middle of a stream"))

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error) if error else self.done.set_result(None)
            self._transport.close()


_FIRST_TOKEN = re.compile(rb'"content":"[^"]')


def _clients(port: int, streams: int, seconds: float, answer: Any) -> None:
    first: list[float] = []
    tokens: list[int] = []

    async def all_of_them() -> int:
        until, loop = time.perf_counter() + seconds, asyncio.get_running_loop()
        clients = [_Client(port, number, until, first, tokens) for number in range(streams)]
        for client in clients:
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        results = await asyncio.gather(*(client.done for client in clients), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                print(result, file=sys.stderr)
        return sum(isinstance(result, Exception) for result in results)

    began = time.perf_counter()
    errors = asyncio.run(all_of_them())
    answer.send((first, sum(tokens), errors, time.perf_counter() - began, time.process_time()))


def _spin() -> None:
    while True:
        pass


def streamed(server: Server, streams: int, seconds: float) -> dict[str, Any]:
    """Throughput and times to the first token for ``streams`` clients over ``seconds``."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_clients, args=(server.port, streams, seconds, theirs))
    process.start()
    before = server.cpu_s()
    first, tokens, errors, took, client_s = ours.recv()
    process.join()
    ordered = sorted(first)
    seconds_of = {name: spent - before[name] for name, spent in server.cpu_s().items()} | {"clients": client_s}
    return {
        "requests": len(ordered),
        "errors": errors,
        "tokens_per_s": round(tokens / took),
        "cpu_s_per_1000_tokens": {name: round(1000 * spent / tokens, 4) for name, spent in seconds_of.items()},
        "first_token_ms": {
            "p50": round(1000 * statistics.median(ordered), 1),
            "p99": round(1000 * ordered[len(ordered) * 99 // 100]),
            "max": round(1000 * ordered[-1]),
        },
    }


def engine_tokens_per_s(model: Path, rows: int, rounds: int = 5) -> float:
    """Tokens per second of the native engine for as many rows, alone on the machine; the median of ``rounds``."""
    policy = PolicyConfig(path=str(model))
    tokenizer, network = load_tokenizer(policy), load_model(policy, load_tokenizer(policy))
    ids = list(tokenizer(PROMPT).input_ids)
    rates = []
    for number in range(rounds + 1):
        seconds = seconds_of_draws(network, [ids] * rows, group=1, tokens=TOKENS, seed=number)
        rates.append(rows * TOKENS / seconds)
    return statistics.median(rates[1:])


def _server_of(checkout: Path) -> Any:
    """``benchmarks/server.py`` of another checkout, which starts the server there."""
    spec = importlib.util.spec_from_file_location("server_before", checkout / "benchmarks" / "server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Server


def _median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number, in the form of one round."""
    first = rounds[0]
    return {
        name: _median_of([each[name] for each in rounds])
        if isinstance(first[name], dict)
        else statistics.median(each[name] for each in rounds)
        for name in first
    }


def compared(model: Path, before: Path, streams: list[int], seconds: float, rounds: int) -> dict[str, Any]:
    """The medians of two servers that are asked by turns, and their ratios, by the number of streams."""
    servers: dict[str, Any] = {}
    try:
        for name, kind in (("before", _server_of(before)), ("after", Server)):
            servers[name] = kind(model, "--max-batch-size", str(max(streams)))
            streamed(servers[name], max(streams), 2.0)  # warm
        found: dict[str, Any] = {}
        for count in streams:
            told: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
            for number in range(rounds):
                for name in ("before", "after") if number % 2 == 0 else ("after", "before"):
                    told[name].append(streamed(servers[name], count, seconds))
            old, new = (_median_of(told[name]) for name in ("before", "after"))
            spent = [sum(told["cpu_s_per_1000_tokens"].get(name, 0) for name in _FRONT) for told in (old, new)]
            ratios = {
                "tokens_per_s": new["tokens_per_s"] / old["tokens_per_s"],
                "front_cpu": spent[1] / spent[0],
                "first_token_p50": new["first_token_ms"]["p50"] / old["first_token_ms"]["p50"],
            }
            found[str(count)] = {
                "before": old,
                "after": new,
                "after_over_before": {name: round(ratio, 3) for name, ratio in ratios.items()},
            }
            print(count, found[str(count)]["after_over_before"], file=sys.stderr)
    finally:
        for server in servers.values():
            server.stop()
    return {"seconds": seconds, "rounds": rounds, "medians_by_streams": found}


_FRONT = ("front", "queues")
"""Processes between the clients and the workers."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[128])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin meanwhile")
    parser.add_argument("--before", type=Path, help="another checkout, with which this one is compared")
    parser.add_argument("--rounds", type=int, default=5, help="of a comparison")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # as in the server's worker
    with tempfile.TemporaryDirectory() as temporary:
        model = build_export(Path(temporary) / "quickstart" / "export")
        result: dict[str, Any] = {"benchmark": "streams", **surroundings("cpu")}
        if args.before is not None:
            result |= compared(model, args.before, args.streams, args.seconds, args.rounds)
        else:
            (streams,) = args.streams
            result |= {"streams": streams, "busy": args.busy} | _beside_the_engine(
                model, streams, args.seconds, args.busy
            )
    publish(result, args.output)


def _beside_the_engine(model: Path, streams: int, seconds: float, busy: int) -> dict[str, Any]:
    engine = engine_tokens_per_s(model, streams)
    server = Server(model, "--max-batch-size", str(streams))
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(busy)]
    try:
        streamed(server, streams, 3.0)  # warm
        for process in spinning:
            process.start()
        found = streamed(server, streams, seconds)
    finally:
        for process in spinning:
            process.kill()
        server.stop()
    ratio = round(found["tokens_per_s"] / engine, 3)
    return {"engine_tokens_per_s": round(engine), **found, "server_over_engine": ratio}


if __name__ == "__main__":
    main()
