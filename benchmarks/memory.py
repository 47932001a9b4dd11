"""Measures peak memory of log-probabilities and their backward pass by tokens and vocabulary, chunked and materialised,
and in chunks beside a teacher as large.

Every figure is measured in its own process, and does not include the inputs and the weight's gradient.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from common import (
    MIB,
    add,
    forget_memory,
    machine_arguments,
    most_memory,
    parser_of,
    publish,
    surroundings,
    synchronise,
)

from grpo_pl.functional.gemm import FastLinear
from grpo_pl.functional.logprobs import TaughtTokens, head_scores, token_entropy, token_logprobs

GRID = [(1024, 32_000), (4096, 32_000), (16_384, 32_000), (4096, 152_000), (16_384, 152_000)]


def one(way: str, tokens: int, vocabulary: int, hidden_size: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Peak MiB beyond inputs and weight gradient, and seconds, of one forward and backward pass."""
    generator = torch.Generator(device).manual_seed(0)
    on: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    hidden = torch.randn(tokens, hidden_size, **on).requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, **on) * 0.02).requires_grad_()
    token_ids = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    head_scores(hidden[:2], weight[:8], token_ids[:2] % 8).logprobs.sum().backward()  # loads the libraries
    taught = None
    if way == "divergence":
        theirs = [torch.randn(size, hidden_size, generator=generator, device=device) for size in (tokens, vocabulary)]
        taught = TaughtTokens(theirs[0], theirs[1] * 0.02, None, 0.5)
    hidden.grad, weight.grad = None, torch.zeros_like(weight)
    weight.grad.fill_(0.0)
    synchronise(device)
    forget_memory(device)  # making the weights took more for a moment, which would hide as much
    before, start = most_memory(device), time.perf_counter()
    weight.grad = None  # frees the memory that the new gradient then takes
    entropy: torch.Tensor | None
    if taught is not None:
        found = head_scores(hidden, weight, token_ids, teacher=taught)
        assert found.divergence is not None
        logprobs, entropy = found.logprobs + found.divergence, found.entropy
    elif way == "chunked":
        logprobs, entropy = head_scores(hidden, weight, token_ids, with_entropy=True)[:2]
    else:
        logits = hidden @ weight.t()
        logprobs, entropy = token_logprobs(logits, token_ids), token_entropy(logits.detach())
    assert entropy is not None
    logprobs.sum().backward()
    synchronise(device)
    return {
        "mib": round(max(0.0, most_memory(device) - before), 1),
        "seconds": round(time.perf_counter() - start, 2),
        "entropy": round(float(entropy.detach().mean()), 4),
    }


def shape(text: str) -> tuple[int, int]:
    tokens, vocabulary = text.split("x")
    return int(tokens), int(vocabulary)


def main() -> None:
    parser = parser_of(__doc__)
    machine_arguments(parser)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of states and weight")
    parser.add_argument(
        "--grid", type=shape, nargs="+", default=GRID, metavar="TOKENSxVOCABULARY", help="by default five of them"
    )
    parser.add_argument("--materialised-limit-gib", type=float, default=4.0, help="logits above this are not tried")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "TOKENS", "VOCABULARY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        way, tokens, vocabulary = arguments.one
        with FastLinear():
            dtype = getattr(torch, arguments.dtype)
            print(json.dumps(one(way, int(tokens), int(vocabulary), arguments.hidden, arguments.device, dtype)))
        return
    record: dict[str, Any] = {"benchmark": "memory", **surroundings(arguments.device), "hidden": arguments.hidden}
    record |= {"dtype": arguments.dtype, "cells": []}
    shared = [f"--device={arguments.device}", f"--threads={arguments.threads}", f"--hidden={arguments.hidden}"]
    shared.append(f"--dtype={arguments.dtype}")
    for tokens, vocabulary in arguments.grid:
        cell: dict[str, Any] = {"tokens": tokens, "vocabulary": vocabulary}
        cell["logits_mib"] = round(tokens * vocabulary * 4 / MIB)
        for way in ("chunked", "divergence", "materialised"):
            if way == "materialised" and cell["logits_mib"] > 1024 * arguments.materialised_limit_gib:
                cell[way] = None
                continue
            command = [sys.executable, __file__, *shared, "--one", way, str(tokens), str(vocabulary)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            cell[way] = json.loads(done.stdout.splitlines()[-1])
        add(cell, record["cells"])
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
