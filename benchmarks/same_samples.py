"""Counts how many samples stay equal when the batch, threads, processes, engine or type change:
``python benchmarks/same_samples.py`` prints JSON.

One rollout is drawn again and again, each time computed in another way, and every row is compared with the first way's.
Where a row differs, the gap of the race's two best scores at its first difference says whether that was a near-tie.
The same with the former rule, one uniform number and the inverse of the cumulative distribution, for comparison.

Policies: ``flat``, made up here, 50,000 tokens with a flat tail; ``--model FOLDER`` a model of your own.
``--time`` measures the share of a token's time that its draw takes instead, in torch.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import SMALL, Cell, keys_of, parser_of, publish, request_of, surroundings
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_pl.distributed.sharding import Sharding, gathered, shard
from grpo_pl.extras.engines.vllm import VLLMEngine
from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.functional.sampling import Noise, PrecomputedNoise, score_gaps, token_keys
from grpo_pl.rollout import decoding
from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native import continuous
from grpo_pl.rollout.native.continuous import ContinuousBatch, SequenceOptions
from grpo_pl.rollout.native.decoder_choice import TORCH
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
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
        least, most = min(100, self.vocabulary // 4), min(self.vocabulary, 20_000)
        return torch.randint(least, most, (self.prompts, 24), generator=generator).tolist()

    @property
    def keys(self) -> list[list[SampleKey]]:
        return keys_of(self.prompts, GROUP)

    def drawn_by(self, engine: RolloutEngine, model: PreTrainedModel, part: slice = slice(None)) -> Tensor:
        """(rows, tokens) of the prompts of ``part``; no row ends early."""
        whole = request_of(self.prompt_ids, GROUP, self.tokens)
        sampling = replace(whole.sampling, temperature=self.temperature)
        asked = replace(whole, prompt_ids=whole.prompt_ids[part], keys=whole.keys[part], sampling=sampling)
        return engine.generate(model, asked).completion_ids


def in_torch(rows: int = 0) -> NativeEngine:
    """The native engine's own forward pass, whose draws can be patched and timed."""
    engine = NativeEngine(max_batch_rows=rows)
    engine.decoder = TORCH
    return engine


def former_draw(logits: Tensor, noise: Noise, *, temperature: float, **_: Any) -> tuple[Tensor, Tensor]:
    """`draw_tokens` by the rule of version 0.2: the first token whose cumulative probability exceeds a number."""
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)
    distribution = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    number = noise.arrival_times(logits.shape[-1])[:, :1].double().neg().exp() * distribution[:, -1:]
    tokens = torch.searchsorted(distribution, number, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@contextmanager
def drawing_by(rule: str) -> Iterator[None]:
    """Within, this process's engines and the server's batch draw by ``rule``, "race" or "former rule"."""
    with ExitStack() as stack:
        if rule != "race":
            for module in (decoding, continuous):
                stack.enter_context(mock.patch.object(module, "draw_tokens", former_draw))
        yield


def flat_policy() -> PreTrainedModel:
    """Random weights whose distributions have a few likely tokens, and a flat tail with a few per cent of the mass.

    The former rule lost rows for two reasons, and both have to be there. Tens of thousands of tokens share the tail, so
    that a cumulative distribution with an error of 1e-7 may move past one. And two ways of computing differ as much as
    they do on a pretrained model: log-probabilities of SmolLM2 by up to 3e-5 to 4e-5 between batches of 64, batches of
    one and `generate`. With weights as small as new ones are, the layers add little to the embedding, and it is a third
    of that; with weights six and ten times as large it was 3e-5 and 6e-5.
    """
    model = FLAT.model("cpu")
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                if weight.ndim == 2:
                    weight *= 8
    head = torch.randn(FLAT.vocabulary, FLAT.hidden, generator=torch.Generator().manual_seed(2)) / FLAT.hidden**0.5
    head[:64] *= 7.5  # standard deviation of their logits; 1 for all others
    model.lm_head.weight = torch.nn.Parameter(head)
    return model


def in_two_processes(model: PreTrainedModel, request: Request, rule: str, *, sharded: bool) -> Tensor:
    """Each of two processes draws half of the prompts with one thread, as under DDP, or from FSDP2's shards."""
    with tempfile.TemporaryDirectory() as folder:
        model.share_memory()
        mp.spawn(_rank, args=(model, request, rule, sharded, Path(folder)), nprocs=2)
        return torch.cat([torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)])


def _rank(rank: int, model: PreTrainedModel, request: Request, rule: str, sharded: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    if sharded:
        model = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
        shard(model, Sharding(mesh=mesh, param_dtype=None, reduce_dtype=None, cpu_offload=False))
    half = request.prompts // 2
    with gathered(model), drawing_by(rule):
        drawn = request.drawn_by(in_torch(), model, slice(rank * half, (rank + 1) * half))
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
                tokens[drawn.sequence] += drawn.tokens
    return torch.tensor(list(tokens.values()))


def with_threads(count: int, draw: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return draw()
    finally:
        torch.set_num_threads(before)


def ways(model: PreTrainedModel, request: Request, rule: str) -> dict[str, Callable[[], Tensor]]:
    """Ways to compute the same rollout; the first one is what the others are compared with. All but "decode kernel"
    draw in torch."""

    def batch(rows: int, part: slice = slice(None)) -> Callable[[], Tensor]:
        return lambda: request.drawn_by(in_torch(rows), model, part)

    def by_kernel(threads: int) -> Tensor:
        engine = NativeEngine()
        engine.decoder = next(iter(built_kernels()))
        return with_threads(threads, lambda: request.drawn_by(engine, model))

    def by_vllm() -> Tensor:
        engine = VLLMEngine(max_batch_rows=64, max_tokens=24 + request.tokens)
        try:
            return request.drawn_by(engine, model)
        finally:
            engine.close()

    other = 2 if torch.get_num_threads() == 1 else 1
    found = {
        "batch 64": batch(64),
        "batch 32": batch(32),
        "batch 1": batch(1, slice(0, 2)),
        "DDP x 2": lambda: in_two_processes(model, request, rule, sharded=False),
        "FSDP2 x 2": lambda: in_two_processes(model, request, rule, sharded=True),
        "plain engine": lambda: request.drawn_by(PlainEngine(max_batch_rows=64), model),
        "server's batch": lambda: by_the_servers_batch(model, request),
    }
    if rule == "race" and built_kernels() and model.dtype == torch.float32:
        found |= {f"decode kernel, {n} thread{'s' * (n > 1)}": functools.partial(by_kernel, n) for n in (1, 2)}
    if rule == "race" and importlib.util.find_spec("vllm") is not None:
        found["vLLM"] = by_vllm
    return found | {f"{other} thread{'s' * (other > 1)}": lambda: with_threads(other, batch(64))}


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
        gap = score_gaps(
            logits, Noise(token_keys(torch.tensor(keys[row : row + 1]), position)), temperature=request.temperature
        )
        logprob = logits.log_softmax(dim=-1)[0, ours[row, position]]
        found.append({"row": row, "token": position, "gap": float(gap), "logprob": round(float(logprob), 2)})
    return found


def measured(
    model: PreTrainedModel, request: Request, rule: str, only: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each way how many rows equal the first one's; with the race what decided the others."""
    reference = None
    for name, draw in ways(model, request, rule).items():
        if reference is not None and only and name not in only:
            continue
        with drawing_by(rule):
            drawn = draw()
        if reference is None:
            reference = drawn
            continue
        equal = (drawn == reference[: len(drawn)]).all(dim=1)
        found: dict[str, Any] = {"equal": int(equal.sum()), "of": len(drawn)}
        if rule == "race" and not equal.all():
            differences = first_differences(model, request, drawn, reference)
            found |= {"largest gap": max(d["gap"] for d in differences), "differences": differences}
        yield name, found


def time_of_draws(model: PreTrainedModel, cell: Cell, repetitions: int) -> dict[str, Any]:
    """Milliseconds of a token of a whole batch, and of its draw with its noise: medians over rollouts."""
    request = Request(prompts=cell.prompts, tokens=cell.completion_tokens, vocabulary=cell.vocabulary)
    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = function(*arguments, **named)
            spent += time.perf_counter() - start
            return result

        return call

    taken = []
    with (
        mock.patch.object(decoding, "draw_tokens", timed(decoding.draw_tokens)),
        mock.patch.object(PrecomputedNoise, "at", timed(PrecomputedNoise.at)),
    ):
        for _ in range(repetitions + 1):
            spent, start = 0.0, time.perf_counter()
            request.drawn_by(in_torch(), model)
            taken.append((time.perf_counter() - start, spent))
    counted = taken[1:]  # the first one warms up
    return {
        "rows": request.rows,
        "tokens": request.tokens,
        "repetitions": repetitions,
        "ms of a token": round(statistics.median(whole for whole, _ in counted) / request.tokens * 1e3, 3),
        "ms of its draw": round(statistics.median(draws for _, draws in counted) / request.tokens * 1e3, 3),
        "share": round(statistics.median(draws / whole for whole, draws in counted), 4),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; the made-up one by default")
    parser.add_argument("--name", help="what the record calls the model; the folder's name by default")
    parser.add_argument("--types", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", default=["48x40", "8x512"], help="prompts x tokens, eight rows a prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0])
    parser.add_argument("--ways", nargs="+", default=[], help="only these, beside 'batch 64'")
    parser.add_argument("--former", nargs="+", help="these by the former rule as well")
    parser.add_argument("--time", action="store_true", help="the time of draws, of a model of 2 layers or of --model")
    arguments = parser.parse_args()
    name = arguments.name or ("flat" if arguments.model is None else arguments.model.name)
    record: dict[str, Any] = {"benchmark": "same samples", **surroundings("cpu"), "policies": {}}
    if arguments.time:
        name = SMALL.name if arguments.model is None else name
        cell = SMALL if arguments.model is None else replace(SMALL, vocabulary=20_000, completion_tokens=12)
        small = SMALL.model("cpu") if arguments.model is None else AutoModelForCausalLM.from_pretrained(arguments.model)
        record["policies"][name] = time_of_draws(small, cell, 15)
        publish(record, arguments.output)
        return
    base = flat_policy() if arguments.model is None else AutoModelForCausalLM.from_pretrained(arguments.model)
    for kind, size, temperature in itertools.product(arguments.types, arguments.sizes, arguments.temperatures):
        model = base.to(getattr(torch, kind)).eval()
        prompts, tokens = (int(part) for part in size.split("x"))
        request = Request(prompts=prompts, tokens=tokens, vocabulary=model.config.vocab_size, temperature=temperature)
        policy = f"{name}, {kind}, {request.rows} rows of {tokens} tokens, temperature {temperature}"
        for rule, only in (("race", arguments.ways), ("former rule", arguments.former)):
            if only is None:
                continue
            found = record["policies"].setdefault(policy, {}).setdefault(rule, {})
            for way, equal in measured(model, request, rule, only):
                found[way] = equal
                publish(record, arguments.output)  # after each, as some take long


if __name__ == "__main__":
    main()
