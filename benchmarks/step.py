"""Compares a whole GRPO step, rollout to optimiser, with TRL's ``GRPOTrainer`` on the same batch, in one process.

A Lightning run makes our steps; after each step, outside its timing, every arm of TRL makes one. Both sides draw 64
completions with the same lengths, score them with the same reward, compute entropy and make one AdamW step in the same
type; neither has a reference model.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from common import (
    BARE_TRL,
    EOS,
    MEDIUM,
    MIB,
    NARROW,
    SMALL,
    Cell,
    ScriptedLengths,
    add,
    bare_trainer,
    be_quiet,
    chosen_cells,
    describe,
    forget_memory,
    lengths_of,
    memory_in_use,
    most_memory,
    parser_of,
    publish,
    ratio,
    shape_arguments,
    summary,
    surroundings,
    synchronise,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from rollout import ScriptedChild, ScriptedNative
from transformers import LogitsProcessorList, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.extras.plan.memory import Fused, Workload, memory_plan, shape_of
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.microbatches import MOST_TOKENS, MOST_TOKENS_ON_CPU
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import Problem, SamplingParams

CPU_CELLS = [SMALL, NARROW, MEDIUM]
PARTS = ["cells", "zero_variance", "pipelined", "bfloat16", "apart", "update", "operators"]
OPERATORS = {
    "products": ("mm", "linear", "mkldnn"),
    "attention": ("scaled_dot", "attention"),
    "silu": ("silu",),
    "copies": ("copy", "cat", "clone", "slice", "empty", "zeros", "fill", "index", "gather", "scatter", "embedding"),
    "softmax": ("softmax", "logsumexp", "exp", "log"),
    "elementwise": ("mul", "add", "neg", "sub", "div", "pow", "mean", "sum", "rsqrt", "norm"),
}
"""Kinds of torch's operators by parts of their names, the first that fits. Norms and the rotary embedding are element
by element."""


@dataclass(kw_only=True)
class Letters(PromptSource):
    """Prompts of random letters; each letter is a token."""

    length: int

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        generator = torch.Generator().manual_seed(7919 * step + attempt)
        codes = torch.randint(97, 123, (count, self.length), generator=generator).tolist()
        return [Problem(id=step * count + i, question="".join(map(chr, row)), answer="") for i, row in enumerate(codes)]

    def validation(self, count: int | None = None) -> list[Problem]:
        return self.prompts(0, count=1)


@dataclass(kw_only=True)
class Checksum(Reward):
    """A cheap reward in [0, 1) that differs between completions; ``equal_share`` of the groups get the same value. Of
    tokens, not of the text: few tokens of a large vocabulary are characters here, and equal rewards are no work."""

    name: str = "checksum"
    correctness: bool = True
    equal_share: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"completion_ids"})

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        prompts = list(dict.fromkeys(columns["prompt"]))
        equal = set(prompts[: round(self.equal_share * len(prompts))])
        values = [
            0.0 if prompt in equal else checksum(ids)
            for prompt, ids in zip(columns["prompt"], columns["completion_ids"], strict=True)
        ]
        return [Score(value, "ok" if value == 1.0 else "wrong") for value in values]


def checksum(ids: Sequence[int]) -> float:
    return zlib.crc32(repr(list(ids)).encode()) % 1000 / 1000


class Ours(Callback):
    """Times our steps, and runs one step of each peer after each of them."""

    def __init__(self, peers: Mapping[str, TrlArm], warmup: int) -> None:
        self.peers, self.warmup = peers, warmup
        self.seconds: list[float] = []
        self.ends: list[float] = []
        """Clock readings after each step, those of peers included."""
        self.stages: list[dict[str, float]] = []
        self.memory: list[float] = []
        """MiB in use after each step."""
        self.theirs: dict[str, list[float]] = {name: [] for name in peers}

    @property
    def updates(self) -> list[float]:
        """Seconds of each update."""
        return [stage["time/backward"] + stage["time/optimizer"] for stage in self.stages]

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        synchronise(module.device.type)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        synchronise(module.device.type)
        seconds = time.perf_counter() - self._start
        theirs = {name: peer.step() for name, peer in self.peers.items()}
        if batch_idx < self.warmup:
            return
        self.seconds.append(seconds)
        self.ends.append(time.perf_counter())
        self.memory.append(memory_in_use(module.device.type))
        names = ("rollout", "wait", "sync_proof", "reward", "logprobs", "backward", "optimizer")
        found = {f"time/{name}": trainer.callback_metrics.get(f"time/{name}") for name in names}
        self.stages.append({name: float(value) for name, value in found.items() if value is not None})
        for name, value in theirs.items():
            self.theirs[name].append(value)


def our_steps(
    cell: Cell,
    lengths: Sequence[int],
    *,
    device: str,
    steps: int,
    peers: Mapping[str, TrlArm],
    equal_share: float = 0.0,
    skip: bool = True,
    staleness: int = 0,
    micro_batch_tokens: int | None = None,
    **options: Any,
) -> Ours:
    """Steps on rollouts of that age; old ones are drawn with one thread beside updates with the others.

    Args:
        options: of the Trainer.
    """
    engine = ScriptedChild(lengths=lengths, threads=1) if staleness else ScriptedNative(lengths=lengths)
    module = GRPOModule(
        policy=PolicyConfig(from_scratch={"model_type": "qwen2", **scratch(cell)}, dtype=cell.dtype),  # type: ignore[arg-type]
        rewards=[Checksum(equal_share=equal_share)],
        algorithm=GRPOAlgorithm(group_size=cell.group, beta=0.0, skip_zero_advantage=skip),
        engine=engine,
        sampling=SamplingParams(max_completion_length=cell.completion_tokens),
        optimization=Optimization(lr=1e-6),
        max_tokens_per_microbatch=micro_batch_tokens,
    )
    data = RolloutDataModule(
        source=Letters(length=cell.prompt_tokens), steps=steps, prompts_per_step=cell.prompts, staleness=staleness
    )
    watch = Ours(peers, warmup=1)
    bare_trainer(watch, device, **options).fit(module, data)
    return watch


def scratch(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in cell.config().items() if not name.endswith("token_id")}


class TrlArm:
    """TRL's trainer, one optimiser step at a time."""

    def __init__(self, cell: Cell, lengths: Sequence[int], device: str, folder: str, **options: Any) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.seconds = 0.0
        prompts = Letters(length=cell.prompt_tokens).prompts(0, count=cell.prompts)
        config = GRPOConfig(
            output_dir=folder,
            generation_batch_size=cell.rows,
            gradient_accumulation_steps=cell.rows // options["per_device_train_batch_size"],
            num_generations=cell.group,
            max_completion_length=cell.completion_tokens,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=1,
            beta=0.0,
            loss_type="grpo",
            use_cpu=device == "cpu",
            **{**BARE_TRL, "bf16": cell.dtype == "bfloat16", **options},
        )
        self.trainer = GRPOTrainer(
            model=cell.model(device),
            reward_funcs=[lambda prompts, completions, completion_ids, **_: list(map(checksum, completion_ids))],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [prompt.question for prompt in prompts]}),
            processing_class=character_tokenizer(),
            callbacks=[_Clock(self, device)],
        )
        self.trainer.remove_callback(PrinterCallback)
        model = self.trainer.model
        script = ScriptedLengths(lengths, cell.prompt_tokens, cell.completion_tokens, device)
        plain = model.generate
        model.generate = lambda *a, **k: plain(*a, logits_processor=LogitsProcessorList([script]), **k)

    def step(self) -> float:
        """Seconds from the start of generation to the end of the optimiser step."""
        self.trainer.train()
        return self.seconds


class _Clock(TrainerCallback):
    def __init__(self, arm: TrlArm, device: str) -> None:
        self.arm, self.device = arm, device

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronise(self.device)
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronise(self.device)
        self.arm.seconds = time.perf_counter() - self.start


def tuned(cell: Cell, lengths: Sequence[int], device: str, folder: str, **options: Any) -> tuple[TrlArm, int]:
    """TRL without activation checkpointing and with the fastest of three micro-batch sizes, and that size."""
    options = {"gradient_checkpointing": False, **options}
    tried: dict[int, tuple[float, TrlArm]] = {}
    sizes = [cell.rows // 2**halvings for halvings in range(8)]
    for size in sizes:
        if len(tried) == 3 or size < 1:
            break
        try:
            arm = TrlArm(cell, lengths, device, folder, per_device_train_batch_size=size, **options)
            arm.step()
            tried[size] = min(arm.step() for _ in range(2 if device == "cpu" else 1)), arm
        except torch.OutOfMemoryError:
            print(f"TRL has no memory for micro-batches of {size} rows", flush=True)
            forget_memory(device)
    best = min(tried, key=lambda size: tried[size][0])
    return tried[best][1], best


def measure(cell: Cell, law: str, device: str, peers: Sequence[str], steps: int) -> dict[str, Any]:
    lengths, size = lengths_of(law, cell), None
    with tempfile.TemporaryDirectory() as folder:
        arms = {}
        if "tuned" in peers:
            arms["trl_tuned"], size = tuned(cell, lengths, device, folder)
        if "default" in peers:
            arms["trl_default"] = TrlArm(cell, lengths, device, folder, per_device_train_batch_size=cell.group)
        ours = our_steps(cell, lengths, device=device, steps=steps + 1, peers=arms)
    return {**compared(cell, law, lengths, ours), "trl_tuned_micro_batch": size}


def compared(cell: Cell, law: str, lengths: Sequence[int], ours: Ours) -> dict[str, Any]:
    """Our steps beside those of the peers that took turns with them."""
    return {
        **describe(cell),
        "lengths": law,
        "tokens": sum(lengths),
        "seconds": {"ours": summary(ours.seconds), **{name: summary(v) for name, v in ours.theirs.items()}},
        "stages": medians(ours.stages),
        **{f"ratio_vs_{name}": ratio(theirs, ours.seconds) for name, theirs in ours.theirs.items()},
    }


def medians(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: summary([stage[name] for stage in stages])["median"] for name in stages[0]}


def in_bfloat16(cell: Cell, law: str, device: str, steps: int) -> dict[str, Any]:
    """Float32 weights computed with in bfloat16 by both sides, and by TRL in float32 and compiled."""
    lengths, sizes, arms = lengths_of(law, cell), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("trl_bfloat16", {"bf16": True}), ("trl_float32", {})):
            arms[name], sizes[name] = tuned(cell, lengths, device, folder, **options)
        if shutil.which("g++"):  # which torch.compile needs on a CPU
            size = sizes["trl_compiled"] = sizes["trl_bfloat16"]
            compiled: dict[str, Any] = {"bf16": True, "torch_compile": True, "gradient_checkpointing": False}
            arms["trl_compiled"] = TrlArm(cell, lengths, device, folder, per_device_train_batch_size=size, **compiled)
            arms["trl_compiled"].step()  # compiles
        ours = our_steps(cell, lengths, device=device, steps=steps + 1, peers=arms, precision="bf16-mixed")
    return {**compared(cell, law, lengths, ours), "trl_micro_batch": sizes}


SIDES: Mapping[str, Mapping[str, Any]] = {
    "ours_float32": {},
    "trl_float32": {},
    "ours_bfloat16": {"precision": "bf16-mixed"},
    "trl_bfloat16": {"bf16": True},
}
"""Name -> what computes its float32 weights in that type, an option of the Trainer or of TRL's config."""


def one_side(side: str, cell: Cell, threads: int, steps: int) -> tuple[list[float], float, dict[str, float]]:
    """Seconds of each step after the first, the most memory in MiB, and our stages, of one side in this process."""
    torch.set_num_threads(threads)
    be_quiet()
    lengths, options = lengths_of("fixed", cell), SIDES[side]
    if side.startswith("ours"):
        ours = our_steps(cell, lengths, device="cpu", steps=steps + 1, peers={}, **options)
        return ours.seconds, most_memory("cpu"), medians(ours.stages)
    options = {"gradient_checkpointing": False, "per_device_train_batch_size": cell.group, **options}
    with tempfile.TemporaryDirectory() as folder:
        arm = TrlArm(cell, lengths, "cpu", folder, **options)
        return [arm.step() for _ in range(steps + 1)][1:], most_memory("cpu"), {}


def apart(cell: Cell, steps: int) -> dict[str, Any]:
    """Steps of a model so large that each side gets a process of its own, one after the other; TRL takes a group at a
    time, without activation checkpointing."""
    found: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            seconds, peak, stages = pool.submit(one_side, side, cell, torch.get_num_threads(), steps).result()
        found[side] = {"seconds": summary(seconds), "peak_mib": round(peak), "stages": stages}
        print(json.dumps({side: found[side]}), flush=True)
    best = {
        name: min(found[f"{name}_{kind}"]["seconds"]["median"] for kind in ("float32", "bfloat16"))
        for name in ("ours", "trl")
    }
    in_float32 = {name: found[f"{name}_float32"]["seconds"]["median"] for name in ("ours", "trl")}
    return {
        **describe(cell),
        "sides": found,
        "ratio_in_float32": round(in_float32["trl"] / in_float32["ours"], 2),
        "ratio_of_best": round(best["trl"] / best["ours"], 2),
    }


ARMS = {"one_thread": (1, 0), "two_threads": (2, 0), "pipelined": (2, 1)}
"""Name -> threads in all, and staleness: the stages one after the other with one thread or two, or at once with one."""


def pipelined(cell: Cell, law: str, steps: int) -> dict[str, Any]:
    """Seconds from one step's end to the next on rollouts one update old, against steps that draw theirs themselves.

    The last step is left out: nothing is drawn beside it. The arms take turns, three times each.
    """
    lengths, threads = lengths_of(law, cell), torch.get_num_threads()
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    stages: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for _ in range(3):
        for name, (count, staleness) in ARMS.items():
            torch.set_num_threads(count)
            ours = our_steps(cell, lengths, device="cpu", steps=steps + 3, peers={}, staleness=staleness)
            seconds[name] += [after - before for before, after in pairwise(ours.ends[:-1])]
            stages[name] += ours.stages[1:-1]
    torch.set_num_threads(threads)
    return {
        **describe(cell),
        "lengths": law,
        "tokens": sum(lengths),
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "stages": {name: medians(found) for name, found in stages.items()},
        "share_of_one_thread": ratio(seconds["pipelined"], seconds["one_thread"]),
        "share_of_two_threads": ratio(seconds["pipelined"], seconds["two_threads"]),
    }


def zero_variance(cell: Cell, device: str, steps: int) -> dict[str, Any]:
    """Update time when half of the groups have equal rewards, with their rows skipped and not."""
    lengths = lengths_of("fixed", cell)
    update: dict[bool, list[float]] = {}
    for skip in (True, False):
        ours = our_steps(cell, lengths, device=device, steps=steps + 1, peers={}, equal_share=0.5, skip=skip)
        update[skip] = ours.updates
    return {
        "cell": cell.name,
        "update_seconds": {"skipped": summary(update[True]), "kept": summary(update[False])},
        "update_time_ratio": round(summary(update[True])["median"] / summary(update[False])["median"], 2),
    }


WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bf16": ("bfloat16", {"precision": "32-true"}),
    "mixed": ("float32", {"precision": "bf16-mixed"}),
    "deterministic": ("float32", {"precision": "bf16-mixed", "deterministic": True}),
    "fsdp": ("float32", {"precision": "32-true"}),
}
"""Name -> type of the weights, and options of the Trainer: bfloat16 throughout; float32 weights that are computed with
in bfloat16; the same with deterministic algorithms; the same as FSDP2 does it, over one process."""


def update(cell: Cell, device: str, tokens: int, ways: Sequence[str], steps: int) -> dict[str, Any]:
    """Tokens a second of the update alone, and the memory of the steps, by `WAYS`.

    Args:
        tokens: of a micro-batch; 0 takes what fits. A prompt that is read once for its group counts once.
    """
    found: dict[str, Any] = {}
    lengths = lengths_of("fixed", cell)
    trained = sum(lengths) + cell.prompts * cell.prompt_tokens
    for way in ways:
        dtype, options = WAYS[way]
        one = replace(cell, dtype=dtype)
        strategy: dict[str, Any] = {"strategy": FSDP2Strategy(param_dtype="bfloat16")} if way == "fsdp" else {}
        forget_memory(device)
        options = {**options, **strategy, "micro_batch_tokens": tokens or None}
        ours = our_steps(one, lengths, device=device, steps=steps + 1, peers={}, **options)
        seconds = summary(ours.updates)
        found[way] = {
            "update_seconds": seconds,
            "tokens_per_second": round(trained / seconds["median"]),
            "step_seconds": summary(ours.seconds),
            "stages": medians(ours.stages),
            "memory_mib": [round(mib) for mib in ours.memory],
            "peak_mib": round(most_memory(device)),
            "planned_mib": round(
                planned(one, way, tokens or MOST_TOKENS, fused="gpu" if device == "cuda" else "none") / MIB
            ),
        }
        print(json.dumps({way: found[way]}), flush=True)
    return {**describe(cell), "micro_batch_tokens": tokens, "tokens": trained, "ways": found}


def operators(cell: Cell, device: str, steps: int) -> dict[str, Any]:
    """Shares of torch's operators in the time of all of them: of the update alone where the decode kernel draws."""

    def kind(name: str) -> str:
        return next((kind for kind, parts in OPERATORS.items() if any(part in name for part in parts)), "other")

    with torch.profiler.profile() as profiler:
        our_steps(
            cell, lengths_of("fixed", cell), device=device, steps=steps, peers={}, micro_batch_tokens=MOST_TOKENS_ON_CPU
        )
    spent: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.key.startswith(("aten::", "mkldnn::")):
            spent[kind(event.key)] = spent.get(kind(event.key), 0.0) + event.self_cpu_time_total
    shares = {name: round(time / sum(spent.values()), 3) for name, time in spent.items()}
    return {**describe(cell), "shares": shares}


def planned(cell: Cell, way: str, tokens: int, *, fused: Fused) -> float:
    """Bytes that ``grpo-pl plan`` foresees at most."""
    with torch.device("meta"):
        shape = shape_of(Qwen2ForCausalLM(Qwen2Config(**cell.config())))
    work = Workload(
        layout="fsdp" if way == "fsdp" else "single",
        processes=1,
        rows=cell.rows,
        group_size=cell.group,
        prompt_tokens=cell.prompt_tokens,
        completion_tokens=cell.completion_tokens,
        micro_batch_tokens=tokens,
        weight_bytes=2 if cell.dtype == "bfloat16" else 4,
        compute_bytes=2,
        reference=False,
        checkpointing=False,
        offload=False,
        deferred=False,
        fused=fused,
    )
    return memory_plan(shape, work).peak


def main() -> None:
    parser = parser_of(__doc__)
    shape_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side, after one warm-up")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument("--peers", nargs="+", choices=["tuned", "default"], default=["tuned", "default"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of the part update")
    parser.add_argument("--micro-batch", type=int, default=16_384, help="tokens; 0 takes what fits, in part update")
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "scripted"], default=["fixed", "scripted"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    be_quiet()
    record: dict[str, Any] = {"benchmark": "step", **surroundings(arguments.device)}
    cells, device, peers = chosen_cells(arguments, CPU_CELLS), arguments.device, arguments.peers
    beside = cells if arguments.device == "cpu" else []
    work = {
        "cells": [partial(measure, cell, law, device, peers) for cell in cells for law in arguments.lengths],
        "zero_variance": [partial(zero_variance, cell, device) for cell in cells],
        "pipelined": [partial(pipelined, cell, law) for cell in beside for law in arguments.lengths],
        "bfloat16": [partial(in_bfloat16, cell, law, device) for cell in beside for law in arguments.lengths],
        "apart": [partial(apart, cell) for cell in cells],
        "update": [partial(update, cell, device, arguments.micro_batch, arguments.ways) for cell in cells],
        "operators": [partial(operators, cell, device) for cell in beside],
    }
    for part in arguments.parts:
        for one in work[part]:
            add(one(steps=arguments.steps), record.setdefault(part, []))
    assert character_tokenizer().eos_token_id == EOS, "the scripts end rows with the tokenizer's EOS"
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
