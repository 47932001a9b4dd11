"""Measures the decode kernels of this machine against torch by width: for ``WIDEST`` in ``decoder_choice.py``.

``python benchmarks/decoders.py --output FILE`` writes a record. ``widest`` of a kernel is the largest width at which
its rollouts were faster than torch's in the median of the repetitions, as they were at all smaller ones.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from common import Cell, interleaved, parser_of, publish, ratio, summary, surroundings
from rollout import drawn

from grpo_pl.extras.kernels.decode_kernel import DecodeKernel, built_kernels
from grpo_pl.rollout.native.decoder_choice import TORCH, WIDEST
from grpo_pl.rollout.native.engine import NativeEngine

WIDTHS = (64, 128, 256, 576, 896)
ROWS = 16
"""Of the products: those that a thread takes together at small widths."""


def cell_of(width: int) -> Cell:
    """64 rows of 64 tokens behind prompts of 64, of a model with this width; fewer tokens where they take long."""
    return Cell(
        name=f"h{width}",
        layers=2 if width < 512 else 8,
        hidden=width,
        intermediate=4 * width if width < 512 else 8 * width // 3 // 32 * 32,
        vocabulary=512,
        heads=4 if width < 512 else width // 64,
        key_heads=2 if width < 512 else width // 64,
        completion_tokens=64 if width < 512 else 16,
    )


def gigaflops(kernel: DecodeKernel, cell: Cell, repetitions: int) -> float:
    """10⁹ operations per second of one thread's products with the weights of a layer of ``cell``, packing left out."""
    work = {f"{inputs} {outputs}": ROWS * inputs * outputs for inputs, outputs in cell.products}
    times = {name: max(1, 20_000_000 // size) for name, size in work.items()}
    arms = {}
    for (name, count), (inputs, outputs) in zip(times.items(), cell.products, strict=True):
        product = kernel.product(torch.randn(outputs, inputs), torch.randn(ROWS, inputs))
        arms[name] = lambda product=product, count=count: [product() for _ in range(count)]
    seconds = interleaved(arms, repetitions=repetitions, device="cpu")
    spent = sum(summary(seconds[name])["median"] / times[name] for name in work)
    return round(2 * sum(work.values()) / spent / 1e9, 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--kernels", nargs="+", choices=list(built_kernels()), default=list(built_kernels()))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {"benchmark": "decoders", **surroundings("cpu"), "rule": WIDEST, "widths": {}}
    for width in sorted(arguments.widths):
        cell = cell_of(width)
        model, arms = cell.model("cpu"), {}
        for name in [TORCH, *arguments.kernels]:
            engine = NativeEngine()
            engine.decoder = name
            arms[name] = drawn(engine, model, cell)
        seconds = interleaved(arms, repetitions=arguments.repetitions, device="cpu")
        record["widths"][width] = {
            name: {
                "seconds": summary(seconds[name]),
                "ratio_vs_torch": ratio(seconds[TORCH], seconds[name]),
                "gigaflops_of_a_thread": None
                if name == TORCH
                else gigaflops(built_kernels()[name], cell, arguments.repetitions),
            }
            for name in arms
        }
        print(json.dumps({width: record["widths"][width]}), flush=True)
    record["widest"] = {name: 0 for name in arguments.kernels}
    for name in arguments.kernels:
        for width in sorted(arguments.widths):
            if record["widths"][width][name]["ratio_vs_torch"] <= 1.0:
                break
            record["widest"][name] = width
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
