"""Many streams at once against the in-process engine: ``python benchmarks/streams.py`` prints JSON.

Every client streams a completion of 32 tokens, and the next as soon as it has ended, from a process of its own on the
same machine, whose work therefore counts against the server. The engine decodes as many rows of the same length, alone.
``--busy 1`` keeps one more process spinning meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import processor
from server import PROMPT, Server, build_export

from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import SampleKey, SamplingParams

TOKENS = 32
BODY = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}


async def _client(port: int, number: int, until: float, first: list[float], tokens: list[int]) -> None:
    """One stream after the other over one connection; notes when the first token came, and how many did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = 0
    while time.perf_counter() < until:
        body = json.dumps({**BODY, "seed": number * 100_000 + request}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        began = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"answered {status!r}")
        waiting = True
        while b"data: [DONE]" not in (line := await reader.readline()):
            if not line:
                raise RuntimeError("the server closed the connection in the middle of a stream")
            if waiting and b'"content":' in line and b'"content":""' not in line.replace(b" ", b""):
                first.append(time.perf_counter() - began)
                waiting = False
        tokens.append(TOKENS)
        while await reader.readline() not in (b"0\r\n", b""):  # the end of the chunked body
            pass
        await reader.readline()
        request += 1
    writer.close()


def _clients(port: int, streams: int, seconds: float, answer: Any) -> None:
    first: list[float] = []
    tokens: list[int] = []

    async def all_of_them() -> int:
        until = time.perf_counter() + seconds
        runs = (_client(port, number, until, first, tokens) for number in range(streams))
        results = await asyncio.gather(*runs, return_exceptions=True)
        return sum(isinstance(result, Exception) for result in results)

    began = time.perf_counter()
    errors = asyncio.run(all_of_them())
    answer.send((first, sum(tokens), errors, time.perf_counter() - began))


def _spin() -> None:
    while True:
        pass


def streamed(server: Server, streams: int, seconds: float) -> dict[str, Any]:
    """What ``streams`` clients see of the server in so many seconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_clients, args=(server.port, streams, seconds, theirs))
    process.start()
    first, tokens, errors, took = ours.recv()
    process.join()
    ordered = sorted(first)
    return {
        "requests": len(ordered),
        "errors": errors,
        "tokens_per_s": round(tokens / took),
        "first_token_ms": {
            "p50": round(1000 * statistics.median(ordered)),
            "p99": round(1000 * ordered[len(ordered) * 99 // 100]),
            "max": round(1000 * ordered[-1]),
        },
    }


def engine_tokens_per_s(model: Path, rows: int, rounds: int = 5) -> float:
    """The same rows in one rollout of the native engine, alone on the machine; the median of some."""
    policy = PolicyConfig(path=str(model))
    tokenizer, network = load_tokenizer(policy), load_model(policy, load_tokenizer(policy))
    ids = list(tokenizer(PROMPT).input_ids)
    rates = []
    for number in range(rounds + 1):
        keys = [
            [SampleKey(seed=number, split="predict", step=0, attempt=0, prompt_id=row, sample=0)] for row in range(rows)
        ]
        began = time.perf_counter()
        NativeEngine().generate(
            network,
            prompt_ids=[ids] * rows,
            keys=keys,
            sampling=SamplingParams(max_completion_length=TOKENS),
            eos_token_ids=[],
            pad_token_id=0,
        )
        rates.append(rows * TOKENS / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin meanwhile")
    args = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # as in the server's worker
    with tempfile.TemporaryDirectory() as temporary:
        model = build_export(Path(temporary) / "quickstart" / "export")
        engine = engine_tokens_per_s(model, args.streams)
        server = Server(model, "--max-batch-size", str(args.streams))
        spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(args.busy)]
        try:
            streamed(server, args.streams, 3.0)  # warm
            for process in spinning:
                process.start()
            found = streamed(server, args.streams, args.seconds)
        finally:
            for process in spinning:
                process.kill()
            server.stop()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "streams": args.streams,
        "busy": args.busy,
        "engine_tokens_per_s": round(engine),
        **found,
        "server_over_engine": round(found["tokens_per_s"] / engine, 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
