"""Measures tokens per second of the native engine against transformers' generate, vLLM and matrix products alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from common import (
    EOS,
    MEDIUM,
    NARROW,
    PAD,
    SHORT,
    SMALL,
    Cell,
    ScriptedLengths,
    add,
    captured,
    chosen_cells,
    describe,
    interleaved,
    lengths_of,
    parser_of,
    publish,
    ratio,
    request_of,
    shape_arguments,
    summary,
    surroundings,
)
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from grpo_pl.extras.engines.child.engine import ChildEngine
from grpo_pl.extras.engines.copy_engine import ModelSpec
from grpo_pl.extras.engines.native_child import NativeChildEngine, NativeWorker
from grpo_pl.extras.engines.vllm import VLLMEngine
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.decoder_choice import TORCH, default_decoder
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.kernels import Matrix
from grpo_pl.types import GenerateRequest, Rollout

CPU_CELLS = [SMALL, NARROW, MEDIUM, SHORT]
VLLM_PYTHON = "GRPO_PL_VLLM_PYTHON"


@dataclass(kw_only=True)
class ScriptedNative(NativeEngine):
    """The native engine with scripted lengths, as the limit of each row; ``generate`` gets the same lengths through a
    logits processor."""

    lengths: Sequence[int] = field(default_factory=list)

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **options: Any) -> Rollout:
        size = request.group_size
        limits = [self.lengths[first : first + size] for first in range(0, len(self.lengths), size)]
        return super().generate(model, replace(request, limits=limits, eos_token_ids=()), **options)


@dataclass(kw_only=True)
class ScriptedChild(NativeChildEngine):
    """`ScriptedNative` in a child process."""

    worker: ClassVar[str] = "rollout:ScriptedWorker"
    lengths: Sequence[int] = field(default_factory=list)

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        return {**super().settings(policy), "lengths": list(self.lengths)}


class ScriptedWorker(NativeWorker):
    """What runs in that process."""

    def __init__(self, *, lengths: Sequence[int], **settings: Any) -> None:
        super().__init__(**settings)
        self._engine = ScriptedNative(lengths=lengths)


def in_children(model: PreTrainedModel, cell: Cell) -> dict[str, ChildEngine]:
    """The engines with a process of their own that run here, each with the model's weights."""
    engines: dict[str, ChildEngine] = {"native_child": NativeChildEngine()}
    if importlib.util.find_spec("vllm") is not None:
        engines["vllm_child"] = VLLMEngine(
            max_batch_rows=cell.rows, max_tokens=cell.prompt_tokens + cell.completion_tokens
        )
    for name, engine in list(engines.items()):
        try:
            drawn(engine, model, cell)()
        except ValueError as refusal:  # vLLM has no kernel for some shapes, such as heads of 16
            print(f"{name} left out of {cell.name}: {refusal}", flush=True)
            engines.pop(name).close()
    return engines


def drawn(
    engine: RolloutEngine, model: PreTrainedModel, cell: Cell, lengths: Sequence[int] | None = None
) -> Callable[[], None]:
    """A rollout whose completions end as the engine's script says; without ``lengths`` none ends before the limit."""
    request = request_of(cell.prompt_ids(), cell.group, cell.completion_tokens, eos=[] if lengths is None else [EOS])
    expected = [cell.completion_tokens] * cell.rows if lengths is None else list(lengths)

    def run() -> None:
        rollout = engine.generate(model, request)
        assert rollout.lengths.tolist() == expected, "the engine did not follow the script"

    return run


def pushing(engine: ChildEngine, model: PreTrainedModel, repetitions: int) -> dict[str, float]:
    """Seconds that the weights take to the process and into its engine."""
    seconds = []
    for _ in range(repetitions):
        engine.update_weights(model)
        start = time.perf_counter()
        engine._push(model)
        seconds.append(time.perf_counter() - start)
    return summary(seconds)


def generate(model: PreTrainedModel, cell: Cell, lengths: Sequence[int], device: str) -> Callable[[], None]:
    prompts = torch.tensor(cell.prompt_ids(), device=device).repeat_interleave(cell.group, dim=0)
    config = GenerationConfig(
        max_new_tokens=cell.completion_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    script = ScriptedLengths(lengths, cell.prompt_tokens, cell.completion_tokens, device)

    @torch.no_grad()
    def run() -> None:
        torch.manual_seed(0)
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            logits_processor=LogitsProcessorList([script]),
        )
        assert ids.shape[1] == cell.prompt_tokens + max(lengths)

    return run


def products_alone(cell: Cell, lengths: Sequence[int], device: str, *, packed: bool) -> Callable[[], None]:
    """Only the fused linear layers of one rollout: each prompt once, then one token per step for every live row, on a
    GPU as one graph each.

    Args:
        packed: use the engine's own kernels; otherwise torch's ``F.linear``.
    """
    dtype = getattr(torch, cell.dtype)
    widths = [*cell.products * cell.layers, (cell.hidden, cell.vocabulary)]
    weights = [torch.randn(out, into, device=device, dtype=dtype) for into, out in widths]
    layers: list[Callable[[Tensor], Tensor]] = [
        Matrix(weight, rows=cell.rows) if packed else partial(torch.nn.functional.linear, weight=weight)
        for weight in weights
    ]
    inputs = {
        width: torch.randn(cell.prompts * cell.prompt_tokens, width, device=device, dtype=dtype) for width, _ in widths
    }
    tokens = torch.tensor(lengths)
    live = [int((tokens > position).sum()) for position in range(1, max(lengths))]

    @torch.no_grad()
    def step(rows: int) -> None:
        for layer, (into, _) in zip(layers, widths, strict=True):
            layer(inputs[into][:rows])

    steps = {rows: captured(partial(step, rows), device) for rows in dict.fromkeys(live)}

    @torch.no_grad()
    def run() -> None:
        for layer, (into, _) in zip(layers[:-1], widths[:-1], strict=True):
            layer(inputs[into])
        layers[-1](inputs[cell.hidden][: cell.prompts])
        for rows in live:
            steps[rows]()

    return run


def keys_and_values_alone(cell: Cell, lengths: Sequence[int], device: str) -> Callable[[], None]:
    """Every key and value of a live row read once for each of its tokens, one layer after the other, as they lie in
    memory: the least that attention of one token must do."""
    size = 2 * cell.key_heads * cell.hidden // cell.heads  # numbers of a token in a layer
    columns = cell.prompt_tokens + max(lengths)
    cache = torch.randn(cell.layers, cell.rows * columns * size, device=device, dtype=getattr(torch, cell.dtype))
    tokens = torch.tensor(lengths)
    steps = [(int((tokens > position).sum()), cell.prompt_tokens + position) for position in range(1, max(lengths))]

    @torch.no_grad()
    def run() -> None:
        for rows, read in steps:
            for layer in cache:
                layer[: rows * read * size].sum()

    return run


def vllm_seconds(cell: Cell, lengths: Sequence[int], repetitions: int) -> dict[str, Any] | None:
    """Seconds per rollout of vLLM in its own environment; None if there is no such environment."""
    python = os.environ.get(VLLM_PYTHON)
    if not python:
        print(f"vLLM left out: set {VLLM_PYTHON} to the python of an environment that has it.", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        cell.model("cpu").save_pretrained(folder)
        request = {
            "model": folder,
            "dtype": cell.dtype,
            "prompts": cell.prompt_ids(),
            "group": cell.group,
            "lengths": list(lengths),
            "threads": torch.get_num_threads(),
            "repetitions": repetitions,
        }
        script = Path(__file__).with_name("vllm_worker.py")
        done = subprocess.run(
            [python, str(script)], input=json.dumps(request), capture_output=True, text=True, check=False
        )
    if done.returncode:  # it has no kernel for some shapes, such as heads of 16
        print(f"vLLM left out of {cell.name}: its worker failed:\n{done.stderr[-2000:]}", flush=True)
        return None
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def alone(cell: Cell, law: str, device: str, repetitions: int) -> dict[str, Any]:
    """Ours without the others beside it."""
    lengths = lengths_of(law, cell)
    arms = {"ours": drawn(ScriptedNative(lengths=lengths), cell.model(device), cell, lengths)}
    seconds = summary(interleaved(arms, repetitions=repetitions, device=device)["ours"])
    speed = round(sum(lengths) / seconds["median"])
    return {**describe(cell), "lengths": law, "seconds": seconds, "tokens_per_second": speed}


def measure(cell: Cell, law: str, device: str, repetitions: int) -> dict[str, Any]:
    lengths, model = lengths_of(law, cell), cell.model(device)
    arms = {
        "ours": drawn(ScriptedNative(lengths=lengths), model, cell, lengths),
        "generate": generate(model, cell, lengths, device),
        "products": products_alone(cell, lengths, device, packed=False),
    }
    if device == "cpu":
        in_torch = ScriptedNative(lengths=lengths)
        in_torch.decoder = TORCH
        arms["ours_in_torch"] = drawn(in_torch, model, cell, lengths)
        arms["own_products"] = products_alone(cell, lengths, device, packed=True)
        arms["keys_and_values"] = keys_and_values_alone(cell, lengths, device)
    children = in_children(model, cell) if law == "fixed" and device == "cpu" else {}  # they would share the GPU
    arms |= {name: drawn(engine, model, cell) for name, engine in children.items()}
    seconds = interleaved(arms, repetitions=repetitions, device=device)
    pushes = {name: pushing(engine, model, repetitions) for name, engine in children.items()}
    for engine in children.values():
        engine.close()
    vllm = vllm_seconds(cell, lengths, repetitions)
    tokens = sum(lengths)
    return {
        **describe(cell),
        "lengths": law,
        "tokens": tokens,
        "tokens_per_second": {name: round(tokens / summary(values)["median"]) for name, values in seconds.items()},
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "ratio_vs_generate": ratio(seconds["generate"], seconds["ours"]),
        "decoder": default_decoder(model) if device == "cpu" else TORCH,
        "ratio_vs_torch": ratio(seconds["ours_in_torch"], seconds["ours"]) if device == "cpu" else None,
        "ratio_vs_vllm": None if vllm is None else ratio(vllm["seconds"], seconds["ours"]),
        "vllm": vllm,
        "push_seconds": pushes,
        "fraction_of_gemm_bound": ratio(seconds["products"], seconds["ours"]),
        **(of_bound(seconds) if device == "cpu" else {}),
    }


def of_bound(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Our speed as a share of what our own products allow, alone and with one read of keys and values."""
    least = [sum(pair) for pair in zip(seconds["own_products"], seconds["keys_and_values"], strict=True)]
    return {
        "fraction_of_own_gemm_bound": ratio(seconds["own_products"], seconds["ours"]),
        "fraction_of_products_and_reads": ratio(least, seconds["ours"]),
    }


PROFILED = 32
"""Tokens of each completion under the profiler."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def profile(cell: Cell, device: str) -> dict[str, Any]:
    """How often the native engine waits for the GPU, and launches something on it, for a token; what takes longest."""
    model, request = cell.model(device), request_of(cell.prompt_ids(), cell.group, PROFILED, eos=[EOS])
    NativeEngine().generate(model, request)
    with torch.profiler.profile() as profiler:
        NativeEngine().generate(model, request)
    events = profiler.key_averages()
    counts = {event.key: event.count for event in events}
    longest = sorted(events, key=lambda event: event.self_device_time_total or event.self_cpu_time_total, reverse=True)
    return {
        **describe(replace(cell, completion_tokens=PROFILED)),
        "waits_per_token": round(sum(counts.get(name, 0) for name in WAITS) / PROFILED, 2),
        "launches_per_token": round(sum(counts.get(name, 0) for name in LAUNCHES) / PROFILED, 1),
        "longest": [
            {
                "name": event.key,
                "count": event.count,
                "device_ms": round(event.self_device_time_total / 1000, 2),
                "cpu_ms": round(event.self_cpu_time_total / 1000, 2),
            }
            for event in longest[:25]
        ],
    }


def main() -> None:
    parser = parser_of(__doc__)
    shape_arguments(parser)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "scripted"], default=["fixed", "scripted"])
    parser.add_argument("--alone", action="store_true", help="time the native engine only")
    parser.add_argument("--profile", action="store_true", help="count waits and launches instead of timing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {"benchmark": "rollout", **surroundings(arguments.device), "cells": []}
    for cell in chosen_cells(arguments, CPU_CELLS):
        if arguments.profile:
            add(profile(cell, arguments.device), record["cells"])
            continue
        for law in arguments.lengths:
            one = alone if arguments.alone else measure
            add(one(cell, law, arguments.device, arguments.repetitions), record["cells"])
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
