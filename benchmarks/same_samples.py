"""Counts how many samples stay equal when the batch, threads, processes, engine or type change:
``python benchmarks/same_samples.py`` prints JSON.

One rollout is drawn again and again, each time computed in another way, and every row is compared with the first way's.
Where a row differs, the gap of the race's two best scores at its first difference says whether that was a near-tie.
The same with the former rule, one uniform number and the inverse of the cumulative distribution, for comparison.

Policies: ``flat``, made up here, 50,000 tokens with a flat tail; ``--model FOLDER`` a model of your own.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Cell, publish, surroundings
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_pl.distributed.sharding import Sharding, gathered, shard
from grpo_pl.functional.sampling import Noise, score_gaps, token_keys
from grpo_pl.rollout.engine import DecodeMonitor, RolloutEngine, row_keys
from grpo_pl.rollout.native.continuous import ContinuousBatch, SequenceOptions
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.vllm import VLLMEngine
from grpo_pl.types import SampleKey, SamplingParams

FLAT = Cell(name="flat", layers=4, hidden=128, intermediate=512, vocabulary=50_000, heads=4, key_heads=2)
GROUP = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every way of computing draws."""

    prompts: int
    tokens: int
    vocabulary: int
    temperature: float = 1.0

    @property
    def rows(self) -> int:
        return self.prompts * GROUP

    @property
    def prompt_ids(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(100, min(self.vocabulary, 20_000), (self.prompts, 24), generator=generator).tolist()

    @property
    def keys(self) -> list[list[SampleKey]]:
        numbered = functools.partial(SampleKey, seed=0, split="train", step=0, attempt=0)
        return [[numbered(prompt_id=p, sample=g) for g in range(GROUP)] for p in range(self.prompts)]

    def drawn_by(self, engine: RolloutEngine, model: PreTrainedModel, part: slice = slice(None)) -> Tensor:
        """(rows, tokens) of the prompts of ``part``; no row ends early."""
        rollout = engine.generate(
            model,
            prompt_ids=self.prompt_ids[part],
            keys=self.keys[part],
            sampling=SamplingParams(max_completion_length=self.tokens, temperature=self.temperature),
            eos_token_ids=[],
            pad_token_id=0,
        )
        return rollout.completion_ids


class FormerRule(NativeEngine):
    """The native engine with the rule of version 0.2: the first token whose cumulative probability exceeds a number."""

    def _choose(
        self, logits: Tensor, noise: Noise, rows: Tensor, position: int, monitor: DecodeMonitor
    ) -> tuple[Tensor, Tensor]:
        logprobs = (logits.float() / monitor.sampling.temperature).log_softmax(dim=-1)
        distribution = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        number = noise.arrival_times(logits.shape[-1])[:, :1].double().neg().exp() * distribution[:, -1:]
        tokens = torch.searchsorted(distribution, number, right=True).clamp(max=logits.shape[-1] - 1)
        return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def flat_policy() -> PreTrainedModel:
    """Random weights whose distributions have a few likely tokens, and a flat tail with about 1 % of the mass."""
    model = FLAT.model("cpu")
    model.config.tie_word_embeddings = False
    head = torch.randn(FLAT.vocabulary, FLAT.hidden, generator=torch.Generator().manual_seed(2)) / FLAT.hidden**0.5
    head[:64] *= 6.5  # standard deviation of their logits; 1 for all others
    model.lm_head.weight = torch.nn.Parameter(head)
    return model


def in_two_processes(model: PreTrainedModel, request: Request, *, sharded: bool) -> Tensor:
    """Each of two processes draws half of the prompts with one thread, as under DDP, or from FSDP2's shards."""
    with tempfile.TemporaryDirectory() as folder:
        model.share_memory()
        mp.spawn(_rank, args=(model, request, sharded, Path(folder)), nprocs=2)
        return torch.cat([torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)])


def _rank(rank: int, model: PreTrainedModel, request: Request, sharded: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    if sharded:
        model = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
        shard(model, Sharding(mesh=mesh, param_dtype=None, reduce_dtype=None, cpu_offload=False))
    half = request.prompts // 2
    with gathered(model):
        drawn = request.drawn_by(NativeEngine(), model, slice(rank * half, (rank + 1) * half))
    torch.save(drawn, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def by_the_servers_batch(model: PreTrainedModel, request: Request) -> Tensor:
    """As the server draws: sequences that join a running batch, a prompt every few steps."""
    options = SequenceOptions(
        sampling=SamplingParams(max_completion_length=request.tokens, temperature=request.temperature)
    )
    batch = ContinuousBatch(model, eos_token_ids=[], max_rows=request.rows)
    tokens: dict[int, list[int]] = {}
    waiting = list(zip(request.prompt_ids, request.keys, strict=True))
    while waiting or len(batch):
        if waiting:
            prompt, keys = waiting.pop(0)
            tokens |= {sequence: [] for sequence in batch.add(prompt, row_keys([keys]), options)}
        for _ in range(2):
            for drawn in batch.step():
                tokens[drawn.sequence].append(drawn.token)
    return torch.tensor(list(tokens.values()))


def with_threads(count: int, draw: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return draw()
    finally:
        torch.set_num_threads(before)


def ways(model: PreTrainedModel, request: Request, rule: type[NativeEngine]) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute the same rollout; the first one is what the others are compared with."""

    def batch(rows: int) -> Callable[[], Tensor]:
        return lambda: request.drawn_by(rule(max_batch_rows=rows), model)

    found = {"batch 64": batch(64), "batch 32": batch(32)}
    if rule is FormerRule:
        return found
    found |= {
        "batch 1": lambda: request.drawn_by(NativeEngine(max_batch_rows=1), model, slice(0, 2)),
        "1 thread": lambda: with_threads(1, batch(64)),
        "DDP x 2": lambda: in_two_processes(model, request, sharded=False),
        "FSDP2 x 2": lambda: in_two_processes(model, request, sharded=True),
        "plain engine": lambda: request.drawn_by(PlainEngine(max_batch_rows=64), model),
        "server's batch": lambda: by_the_servers_batch(model, request),
    }
    if importlib.util.find_spec("vllm") is not None:
        engine = VLLMEngine(max_batch_rows=64, max_tokens=24 + request.tokens)
        found["vLLM"] = lambda: request.drawn_by(engine, model)
    return found


def first_differences(model: PreTrainedModel, request: Request, ours: Tensor, theirs: Tensor) -> list[dict[str, Any]]:
    """Of each row that differs: where, and by how much the first way's token won its race there."""
    differs = ours != theirs[: len(ours)]
    keys = row_keys(request.keys)
    found = []
    for row in differs.any(dim=1).nonzero().flatten().tolist():
        position = int(differs[row].int().argmax())
        context = torch.tensor([request.prompt_ids[row // GROUP] + ours[row, :position].tolist()])
        with torch.no_grad():
            logits = model(context).logits[:, -1].float()
        gap = score_gaps(logits, Noise(token_keys(torch.tensor(keys[row : row + 1]), position)), temperature=1.0)
        logprob = logits.log_softmax(dim=-1)[0, ours[row, position]]
        found.append({"row": row, "token": position, "gap": float(gap), "logprob": round(float(logprob), 2)})
    return found


def measured(model: PreTrainedModel, request: Request, rule: type[NativeEngine], only: Sequence[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    reference = None
    for name, draw in ways(model, request, rule).items():
        if reference is not None and only and name not in only:
            continue
        start = time.perf_counter()
        drawn = draw()
        seconds = round(time.perf_counter() - start, 1)
        if reference is None:
            reference = drawn
            rows["seconds of batch 64"] = seconds
            continue
        differences = [] if torch.equal(drawn, reference) else first_differences(model, request, drawn, reference)
        rows[name] = {"equal": len(drawn) - len(differences), "of": len(drawn), "seconds": seconds}
        if rule is NativeEngine and differences:
            rows[name] |= {"largest gap": max(d["gap"] for d in differences), "differences": differences}
        print(rule.__name__, request.tokens, name, rows[name], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; the made-up one by default")
    parser.add_argument("--types", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", default=["48x40", "8x512"], help="prompts x tokens, eight rows a prompt")
    parser.add_argument("--ways", nargs="+", default=[], help="only these, beside 'batch 64'")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "same samples", **surroundings("cpu"), "policies": {}}
    base = flat_policy() if arguments.model is None else AutoModelForCausalLM.from_pretrained(arguments.model)
    name = "flat" if arguments.model is None else arguments.model.name
    for kind in arguments.types:
        model = base.to(getattr(torch, kind)).eval()
        for size in arguments.sizes:
            prompts, tokens = (int(part) for part in size.split("x"))
            request = Request(prompts=prompts, tokens=tokens, vocabulary=model.config.vocab_size)
            record["policies"][f"{name}, {kind}, {prompts * GROUP} rows of {tokens} tokens"] = {
                rule.__name__: measured(model, request, rule, arguments.ways) for rule in (NativeEngine, FormerRule)
            }
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
