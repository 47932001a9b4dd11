"""Compares ``grpo-pl plan`` for an update under FSDP2 with torch's ``MemTracker``, without a GPU or weights.

    python benchmarks/tracked_memory.py [--processes 8] [--layers 28]

Tensors are fake ones, which have shapes and no contents, and so is the group of processes. The policy has the shape of
Qwen2.5-7B, is sharded as a run shards it, and computes two micro-batches by the modules of a GPU run: packed attention,
fused norms, SiLU and LM head, whose kernels start nothing here. The optimiser's moments are left out: they are
2 N w / n in the plan and in AdamW alike.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from common import MIB, add, parser_of, publish
from torch import Tensor
from torch import distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from grpo_pl.distributed.sharding import transformer_blocks
from grpo_pl.extras.kernels import fused_modules
from grpo_pl.extras.plan.memory import Shape, Workload, memory_plan, shape_of
from grpo_pl.functional import logprobs
from grpo_pl.functional.gemm import FastLinear
from grpo_pl.policy.checkpointing import checkpoint_activations, repeated
from grpo_pl.policy.packing import Packing, Rows, pack, packed_attention

SEVEN_BILLION = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152_064,
    num_hidden_layers=28,
    tie_word_embeddings=False,
)
GROUP, PROMPT = 8, 256
CELLS = [(512, False), (1536, False), (1536, True), (4096, True)]
"""Completion tokens of a group that is a micro-batch, and whether activations are computed again."""


# --- kernels that start nothing ---------------------------------------------------------------------------------------


class _Kernel:
    """In place of a kernel in Triton: ``kernel[grid](…)`` would write into tensors that are there."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


def without_triton() -> None:
    """Lets the modules with kernels be imported where Triton is not installed."""
    language = types.ModuleType("triton.language")
    language.constexpr = object  # type: ignore[attr-defined]
    triton: Any = types.ModuleType("triton")
    triton.language, triton.jit, triton.cdiv = language, lambda kernel: kernel, lambda n, size: -(-n // size)
    sys.modules.setdefault("triton", triton)
    sys.modules.setdefault("triton.language", language)


class _Norm(torch.autograd.Function):
    """``F.rms_norm`` as it keeps memory on a GPU: one kernel, whose input, weight and factors wait for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Context manager: within it modules compute as on a GPU, and no kernel starts."""
    without_triton()
    from grpo_pl.extras.kernels import gated, head

    with ExitStack() as stack:
        for module in (logprobs, fused_modules):
            stack.enter_context(mock.patch.object(module, "has_triton", lambda device: True))
        for module, name in ((gated, "_forward"), (gated, "_backward"), (head, "_score"), (head, "_slope")):
            stack.enter_context(mock.patch.object(module, name, _Kernel()))
        norm = mock.patch.object(fused_modules, "_norm_on_gpu", lambda module, x: _Norm.apply(x, module.weight))
        stack.enter_context(norm)
        yield


# --- one process's update ---------------------------------------------------------------------------------------------


def rows_of(completion_tokens: int) -> Rows:
    """A prompt and its completions, all of full length."""
    prompt, completion = torch.ones(GROUP, PROMPT).long(), torch.ones(GROUP, completion_tokens).long()
    return Rows(prompt, prompt.bool(), completion, completion.bool())


def tracked(config: Qwen2Config, rows: Rows, *, processes: int, checkpointing: bool) -> float:
    """Bytes at the peak of two micro-batches of such rows, of the parameters' shards, gradients and all that passes."""
    real, scored = pack(rows), rows.completion_ids.flatten()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        mesh = init_device_mesh("cpu", (processes,))
        with on_a_gpu(), FakeTensorMode() as fake:

            def faked(tensor: Tensor) -> Tensor:
                return fake.from_tensor(tensor)

            model = Qwen2ForCausalLM(config).train()
            if checkpointing:
                checkpoint_activations(model)
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for unit in (*transformer_blocks(model), model):
                fully_shard(unit, mesh=mesh, mp_policy=precision)
            packing = replace(
                real,
                input_ids=faked(real.input_ids),
                position_ids=faked(real.position_ids),
                buckets=[faked(bucket) for bucket in real.buckets],
                source=faked(real.source),
            )
            ids, chosen = faked(scored), faked(real.predicting)
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                for _ in range(2):
                    tracker.reset_mod_stats()  # which hold one pass
                    micro_batch(model, packing, ids, chosen)
            (peak,) = tracker.get_tracker_snapshot("peak").values()
    finally:
        dist.destroy_process_group()
    return float(peak["Total"])


def micro_batch(model: PreTrainedModel, packing: Packing, ids: Tensor, chosen: Tensor) -> None:
    """As `policy.logprobs` computes it, and the gradient of its sum."""
    head: Any = model.get_output_embeddings()

    def score(hidden: Tensor) -> Tensor:
        states = hidden.squeeze(0).index_select(0, chosen)
        return logprobs.head_scores(states, head.weight, ids, with_entropy=True).logprobs.unsqueeze(-1)

    inputs = {"input_ids": packing.input_ids, "position_ids": packing.position_ids, "packing": packing}
    head.forward = score
    contexts = (
        FastLinear,
        partial(fused_modules.patched, fused_modules.fused_forwards(model)),
        partial(packed_attention, model),
    )
    with repeated(*contexts):
        total = model(**inputs, use_cache=False).logits.sum()
    total.backward()


def planned(shape: Shape, *, processes: int, completion_tokens: int, checkpointing: bool) -> dict[str, float]:
    """What the plan has for the same, by part."""
    work = Workload(
        layout="fsdp",
        processes=processes,
        rows=2 * GROUP,
        group_size=GROUP,
        prompt_tokens=PROMPT,
        completion_tokens=completion_tokens,
        micro_batch_tokens=PROMPT + GROUP * completion_tokens,
        weight_bytes=4,
        compute_bytes=2,
        reference=False,
        checkpointing=checkpointing,
        offload=False,
        deferred=False,
        fused="gpu",
    )
    plan = memory_plan(shape, work)
    return {"parameters": plan.kept["parameters"], **plan.update}


def compare(*, layers: int, processes: int, completion_tokens: int, checkpointing: bool) -> dict[str, Any]:
    """The plan beside the tracker, at depth ``layers``, in MiB."""
    config = Qwen2Config(**{**SEVEN_BILLION.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    options: dict[str, Any] = {"processes": processes, "checkpointing": checkpointing}
    seen = tracked(config, rows_of(completion_tokens), **options)
    with torch.device("meta"):
        shape = shape_of(Qwen2ForCausalLM(config))
    parts = planned(shape, completion_tokens=completion_tokens, **options)
    return {
        "micro_batch_tokens": PROMPT + GROUP * completion_tokens,
        "checkpointing": checkpointing,
        "tracked_mib": round(seen / MIB),
        "planned_mib": round(sum(parts.values()) / MIB),
        "planned_parts_mib": {name: round(part / MIB) for name, part in parts.items()},
        "planned_of_tracked": round(sum(parts.values()) / seen, 3),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--layers", type=int, default=28)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "tracked_memory", "torch": torch.__version__, "cells": []}
    record |= {"processes": arguments.processes, "layers": arguments.layers}
    for completion_tokens, checkpointing in CELLS:
        options: dict[str, Any] = {"completion_tokens": completion_tokens, "checkpointing": checkpointing}
        add(compare(layers=arguments.layers, processes=arguments.processes, **options), record["cells"])
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
