"""Measures how time and memory of a GRPO step grow with tokens, group size, completion length, model size and ranks."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    HALF_BILLION,
    MEDIUM,
    SMALL,
    Cell,
    add,
    be_quiet,
    forget_memory,
    lengths_of,
    machine_arguments,
    most_memory,
    parser_of,
    publish,
    summary,
    surroundings,
)
from runs import CONFIGS, fit, numbers
from step import medians, our_steps


def sweep(device: str) -> list[tuple[str, int, Cell]]:
    """(axis, value, cell) for values along one axis at a time, around a base cell."""
    base = SMALL if device == "cpu" else replace(HALF_BILLION, prompts=8, completion_tokens=128)
    wide = MEDIUM if device == "cpu" else base
    rollouts = [replace(wide, prompts=prompts) for prompts in (2, 4, 8, 16, 32, 64)]
    cells = [("tokens", cell.rows * cell.completion_tokens, cell) for cell in rollouts]
    cells += [("group", group, replace(base, group=group)) for group in (4, 8, 16, 32)]
    cells += [("completion", tokens, replace(base, completion_tokens=tokens)) for tokens in (64, 128, 256, 512)]
    cells += [
        ("hidden", hidden, replace(base, hidden=hidden, intermediate=4 * hidden, heads=hidden // 16))
        for hidden in ((64, 128, 256) if device == "cpu" else ())
    ]
    cells += [("layers", layers, replace(base, layers=layers)) for layers in (2, 4, 8)]
    return cells


def time_cell(cell: Cell, device: str, steps: int) -> dict[str, Any]:
    lengths = lengths_of("fixed", cell)
    forget_memory(device)
    watch = our_steps(cell, lengths, device=device, steps=steps + 1, peers={})
    median = summary(watch.seconds)["median"]
    return {
        "seconds": summary(watch.seconds),
        "stages": medians(watch.stages),
        "tokens_per_second": round(sum(lengths) / median),
        "peak_mib": round(most_memory(device)),
        "memory_mib": [round(mib) for mib in watch.memory],  # after each step
    }


def growth(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """b of seconds = a · value^b by least squares over the logarithms, where 1 is linear; and how much each cell lies
    above the line a + b · value."""
    values, seconds = [cell["value"] for cell in cells], [cell["seconds"]["median"] for cell in cells]
    power = statistics.linear_regression([math.log(v) for v in values], [math.log(s) for s in seconds])
    line = statistics.linear_regression(values, seconds)
    above = [s / (line.intercept + line.slope * v) - 1.0 for v, s in zip(values, seconds, strict=True)]
    return {
        "exponent": round(power.slope, 3),
        "line": {"seconds": round(line.intercept, 4), "seconds_per_1000": round(1000 * line.slope, 4)},
        "above_line": [round(share, 3) for share in above],
    }


def ranks(counts: list[int], steps: int) -> list[dict[str, Any]]:
    """Step time of the quickstart in several processes of one thread each; meaningful only with as many cores."""
    results: list[dict[str, Any]] = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            options = [f"--data.steps={steps + 1}", "--data.val_prompts=8", "--model.cold_start=null"]
            options += [f"--trainer.devices={count}"] + (["--trainer.strategy=ddp"] if count > 1 else [])
            done = fit(CONFIGS / "quickstart.yaml", Path(folder), *options, variables={"OMP_NUM_THREADS": "1"})
            seconds = numbers(done.rows("step_time"), "step_time", 9)
        add({"axis": "ranks", "value": count, "seconds": summary(seconds[1:])}, results)
    return results


def main() -> None:
    parser = parser_of(__doc__)
    machine_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each cell, after one warm-up")
    parser.add_argument("--axes", nargs="+", choices=["tokens", "group", "completion", "hidden", "layers", "ranks"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    be_quiet()
    record: dict[str, Any] = {"benchmark": "scaling", **surroundings(arguments.device), "cells": []}
    for axis, value, cell in sweep(arguments.device):
        if arguments.axes and axis not in arguments.axes:
            continue
        measured = time_cell(cell, arguments.device, arguments.steps)
        add({"axis": axis, "value": value, **measured}, record["cells"])
    if by_tokens := [cell for cell in record["cells"] if cell["axis"] == "tokens"]:
        record["growth_with_tokens"] = growth(by_tokens)
    if arguments.device == "cpu" and (not arguments.axes or "ranks" in arguments.axes):
        record["cells"] += ranks([1, 2], arguments.steps)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
