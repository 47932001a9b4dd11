"""Measures what bfloat16 and torch.compile would gain for rollout and update of a model, against eager float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import (
    HALF_BILLION,
    MEDIUM,
    SMALL,
    Cell,
    add,
    interleaved,
    machine_arguments,
    parser_of,
    publish,
    ratio,
    summary,
    surroundings,
)
from rollout import drawn
from torch import Tensor
from transformers import PreTrainedModel

from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.native.engine import NativeEngine


def tokens(cell: Cell, device: str) -> tuple[Tensor, Tensor]:
    """Prompts (B, S) and completions (B, T)."""
    prompts = torch.tensor(cell.prompt_ids()).repeat_interleave(cell.group, dim=0)
    drawn = torch.randint(5, 90, (cell.rows, cell.completion_tokens), generator=torch.Generator().manual_seed(2))
    return prompts.to(device), drawn.to(device)


def update(model: PreTrainedModel, cell: Cell, device: str) -> Callable[[], None]:
    """Forward and backward passes over all completions, half of the groups at a time."""
    prompts, drawn = tokens(cell, device)

    def run() -> None:
        for rows in torch.arange(cell.rows).split(cell.rows // 2):
            logprobs, _ = completion_logprobs(
                model,
                prompt_ids=prompts[rows],
                prompt_mask=torch.ones_like(prompts[rows], dtype=torch.bool),
                completion_ids=drawn[rows],
                completion_mask=torch.ones_like(drawn[rows], dtype=torch.bool),
                temperature=1.0,
                with_entropy=True,
            )
            logprobs.sum().backward()

    return run


def padded_update(trunk: Callable[..., Any], cell: Cell, device: str) -> Callable[[], None]:
    """Forward and backward passes of the trunk over padded rows of one shape, the best case for a compiler."""
    ids = torch.cat(tokens(cell, device), dim=1)

    def run() -> None:
        for part in ids.split(cell.rows // 2):
            trunk(input_ids=part, use_cache=False).last_hidden_state.sum().backward()

    return run


def measure(cell: Cell, device: str, repetitions: int) -> dict[str, Any]:
    wide = replace(cell, dtype="float32").model(device)
    narrow = replace(cell, dtype="bfloat16").model(device)
    draws = {"float32": drawn(NativeEngine(), wide, cell), "bfloat16": drawn(NativeEngine(), narrow, cell)}
    rollouts = interleaved(draws, repetitions=repetitions, device=device)
    wide.train(), narrow.train()
    updates = interleaved(
        {"float32": update(wide, cell, device), "bfloat16": update(narrow, cell, device)},
        repetitions=repetitions,
        device=device,
    )
    compiled = torch.compile(wide.model)
    began = time.perf_counter()
    padded_update(compiled, cell, device)()
    first = time.perf_counter() - began
    trunks = interleaved(
        {"eager": padded_update(wide.model, cell, device), "compiled": padded_update(compiled, cell, device)},
        repetitions=repetitions,
        device=device,
    )
    found = {"rollout": rollouts, "update": updates, "padded trunk": trunks}
    return {
        "cell": cell.name,
        "seconds": {what: {name: summary(v) for name, v in arms.items()} for what, arms in found.items()},
        "bfloat16_is_faster_by": {
            what: ratio(arms["float32"], arms["bfloat16"]) for what, arms in found.items() if "bfloat16" in arms
        },
        "compiled_is_faster_by": ratio(trunks["eager"], trunks["compiled"]),
        "compilation_seconds": round(first, 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    machine_arguments(parser)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {"benchmark": "options", **surroundings(arguments.device), "cells": []}
    for cell in [SMALL, MEDIUM] if arguments.device == "cpu" else [HALF_BILLION]:
        add(measure(cell, arguments.device, arguments.repetitions), record["cells"])
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
