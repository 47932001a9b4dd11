"""Shared parts of the benchmarks: options, cells, scripted lengths, requests, interleaved timing, records."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import resource
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_pl.files.writing import staged
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams

EOS, PAD = 1, 0
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The shape of a model, and the size of a batch."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_heads: int
    dtype: str = "float32"
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 64
    completion_tokens: int = 128

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the fused linear layers of a block."""
        size = self.hidden // self.heads
        return [
            (self.hidden, (self.heads + 2 * self.key_heads) * size),
            (self.heads * size, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        ]

    def config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        }

    def model(self, device: str) -> PreTrainedModel:
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(Qwen2Config(**self.config()))
        return model.to(dtype=getattr(torch, self.dtype)).eval()

    def prompt_ids(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(5, 90, (self.prompts, self.prompt_tokens), generator=generator).tolist()


SMALL = Cell(name="L2-h64-V512", layers=2, hidden=64, intermediate=256, vocabulary=512, heads=4, key_heads=2)
NARROW = Cell(name="L3-h128-V128", layers=3, hidden=128, intermediate=512, vocabulary=128, heads=4, key_heads=2)
"""The shape of the quickstart's policy, with room for the letters of prompts."""
MEDIUM = Cell(name="L4-h256-V2048", layers=4, hidden=256, intermediate=1024, vocabulary=2048, heads=4, key_heads=2)
SHORT = replace(MEDIUM, name="L4-h256-V2048-64+64", completion_tokens=64)
HALF_BILLION = Cell(
    name="Qwen2.5-0.5B-shape",
    layers=24,
    hidden=896,
    intermediate=4864,
    vocabulary=151_936,
    heads=14,
    key_heads=2,
    dtype="bfloat16",
    prompts=32,
    prompt_tokens=128,
    completion_tokens=512,
)
HALF_BILLION_SHORT = replace(
    HALF_BILLION,
    name="Qwen2.5-0.5B-shape-4x4x64",
    dtype="float32",
    prompts=4,
    group=4,
    prompt_tokens=64,
    completion_tokens=64,
)


CELLS = {cell.name: cell for cell in (SMALL, NARROW, MEDIUM, SHORT, HALF_BILLION, HALF_BILLION_SHORT)}


def parser_of(description: str | None, *, goes_on: bool = False) -> argparse.ArgumentParser:
    """A parser with the option ``--output``.

    Args:
        description: the docstring of the benchmark.
        goes_on: a further call adds to the record, which therefore has to be named.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = "the record, which a further call goes on with" if goes_on else "file for the record, which is printed, too"
    parser.add_argument("--output", type=Path, required=goes_on, help=told)
    return parser


def machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that choose the device and the number of threads."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """`machine_arguments`, and those that choose cells and change the size of their batch."""
    machine_arguments(parser)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), help="all of the device's by default")
    parser.add_argument("--rows", type=int, nargs="+", help="completions of a rollout, instead of the cell's")
    parser.add_argument("--tokens", type=int, help="most tokens of a completion, instead of the cell's")


def chosen_cells(arguments: argparse.Namespace, on_cpu: Sequence[Cell]) -> list[Cell]:
    """Those of the device, or those asked for, in every size asked for.

    Raises:
        ValueError: rows that are not whole groups.
    """
    default = on_cpu if arguments.device == "cpu" else [HALF_BILLION]
    cells = [CELLS[name] for name in arguments.cells] if arguments.cells else list(default)
    if arguments.tokens:
        cells = [replace(cell, completion_tokens=arguments.tokens) for cell in cells]
    sized = []
    for cell in cells:
        for rows in arguments.rows or [cell.rows]:
            if rows % cell.group:
                raise ValueError(f"--rows {rows}: give a multiple of the group size, {cell.group}.")
            sized.append(replace(cell, prompts=rows // cell.group))
    return sized


def scripted_lengths(rows: int, limit: int, *, seed: int = 0) -> list[int]:
    """Lognormal lengths of at least 1; the longest is ``limit``, about four times their mean."""
    draws = torch.randn(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    low, high = 0.0, 4.0
    for _ in range(60):  # the ratio grows with sigma
        sigma = (low + high) / 2
        lengths = (draws * sigma).exp()
        low, high = (sigma, high) if lengths.max() / lengths.mean() < 4.0 else (low, sigma)
    return (lengths / lengths.max() * limit).round().clamp(min=1).long().tolist()


def lengths_of(law: str, cell: Cell) -> list[int]:
    """Completion tokens of each row: all at the limit, or scripted."""
    if law == "fixed":
        return [cell.completion_tokens] * cell.rows
    return scripted_lengths(cell.rows, cell.completion_tokens)


def force_lengths(logits: Tensor, lengths: Tensor, position: int, *, limit: int) -> Tensor:
    """Logits (B, V) with which a row of ``lengths`` n < ``limit`` draws EOS exactly as its n-th token, and no row draws
    it elsewhere."""
    ends = (lengths == position + 1) & (lengths < limit)
    forced = logits.masked_fill(ends.unsqueeze(1), -torch.inf)
    forced[:, EOS] = torch.zeros_like(ends, dtype=logits.dtype).masked_fill(~ends, -torch.inf)
    return forced


class ScriptedLengths(LogitsProcessor):
    """:func:`force_lengths` for transformers' ``generate``; one length per row of the call."""

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, limit: int, device: str) -> None:
        self.lengths = torch.tensor(lengths, device=device)
        self.prompt_tokens, self.limit = prompt_tokens, limit

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return force_lengths(scores, self.lengths, input_ids.shape[1] - self.prompt_tokens, limit=self.limit)


def keys_of(prompts: int, group: int, *, step: int = 0, seed: int = 0) -> list[list[SampleKey]]:
    """Names of ``group`` samples of each of the prompts 0, 1 …"""
    return [
        [SampleKey(seed=seed, split="train", step=step, attempt=0, prompt_id=p, sample=g) for g in range(group)]
        for p in range(prompts)
    ]


def request_of(
    prompt_ids: Sequence[Sequence[int]], group: int, tokens: int, *, eos: Sequence[int] = (), seed: int = 0
) -> GenerateRequest:
    """``group`` completions of each prompt, of ``tokens`` tokens unless one of ``eos`` ends them."""
    return GenerateRequest(
        prompt_ids=prompt_ids,
        keys=keys_of(len(prompt_ids), group, seed=seed),
        sampling=SamplingParams(max_completion_length=tokens),
        eos_token_ids=eos,
        pad_token_id=PAD,
    )


def be_quiet() -> None:
    """Silences the warnings and messages of libraries in this process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def bare_trainer(watch: Callback, device: str = "cpu", **options: Any) -> Trainer:
    """A Trainer that does nothing but train, in float32 unless ``options`` say otherwise."""
    return Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        **{"precision": "32-true", **options},
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
    )


BARE_TRL: Mapping[str, Any] = {
    "report_to": [],
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Options of TRL's ``GRPOConfig`` with which its trainer does nothing but train."""


def interleaved(arms: Mapping[str, Callable[[], object]], *, repetitions: int, device: str) -> dict[str, list[float]]:
    """Seconds of each repetition by arm; the arms take turns, after one warm-up each that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(repetitions + 1):
        for name, arm in arms.items():
            synchronise(device)
            start = time.perf_counter()
            arm()
            synchronise(device)
            if repetition:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def captured(work: Callable[[], object], device: str) -> Callable[[], object]:
    """``work`` as a CUDA graph, which the host launches at once: launched one by one, short kernels take as long as the
    host takes to launch them. On a CPU ``work`` itself."""
    if device == "cpu":
        return work
    work()  # which loads every kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def most_memory(device: str) -> float:
    """Most memory in MiB that this process has used: on a GPU that of tensors, there and on Linux since
    `forget_memory`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    with suppress(OSError), open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024  # KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_in_use(device: str) -> float:
    """Memory of this process now, in MiB; on a GPU that of tensors."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / MIB
    return psutil.Process().memory_info().rss / MIB


def forget_memory(device: str) -> None:
    """Begins `most_memory` anew: on a GPU, and on Linux."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # of `man 5 proc`: the peak becomes what is resident now


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum in seconds, and the number of repetitions."""
    return {
        "median": round(statistics.median(seconds), 4),
        "min": round(min(seconds), 4),
        "max": round(max(seconds), 4),
        "repetitions": len(seconds),
    }


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times faster ours is: the median of theirs / ours over repetitions that ran one after the other."""
    return round(statistics.median(t / o for t, o in zip(theirs, ours, strict=True)), 2)


def surroundings(device: str) -> dict[str, Any]:
    """Date, machine, load, threads and versions under which figures are measured."""
    versions = {}
    for package in ("torch", "transformers", "trl", "vllm", "lightning"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions,
    }


def processor() -> str:
    """The processor's name, with family and model: a virtual machine may name no more than the maker."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    facts = {name.strip(): value.strip() for name, value in pairs}
    if "model name" not in facts:
        return platform.processor()
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_runs(record: Path) -> list[dict[str, Any]]:
    """The runs of a record that is gone on with; none where there is no file yet."""
    runs: list[dict[str, Any]] = json.loads(record.read_text())["runs"] if record.is_file() else []
    return runs


def write(record: Mapping[str, Any], output: Path | None) -> None:
    """Writes the record, whole or not at all, where a file is given; a benchmark that is ended leaves what it has."""
    if output is not None:
        with staged(output) as file:
            file.write_text(json.dumps(record, indent=2) + "\n")


def publish(record: Mapping[str, Any], output: Path | None) -> None:
    """Writes the record to ``output`` and prints it as the last line."""
    write(record, output)
    print(json.dumps(record), flush=True)


def describe(cell: Cell) -> dict[str, Any]:
    return {("cell" if key == "name" else key): value for key, value in asdict(cell).items()}


def add(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Adds a row to those of a record, and prints it."""
    rows.append(row)
    print(json.dumps(row), flush=True)
