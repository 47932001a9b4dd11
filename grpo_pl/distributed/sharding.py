"""A policy cut among processes by FSDP2: cutting, filling, gathering for a rollout, and putting together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from grpo_pl.policy.lora import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are cut and computed with."""

    mesh: DeviceMesh
    """One-dimensional: the processes that share the policy."""
    param_dtype: torch.dtype | None
    """Type of gathered parameters and of the computation; None keeps that of the weights."""
    reduce_dtype: torch.dtype | None
    """Type in which gradients are summed."""
    cpu_offload: bool
    """Keep shards, gradients and optimiser state in main memory."""


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest list of modules inside a model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())
    return list(largest.children())


def build_once(build: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """``build()`` in the first process; elsewhere the same architecture on uninitialised
    memory. ``shard`` fills it."""
    if dist.get_rank() == 0:
        return build()
    with torch.device("meta"):
        model = build(weights=False)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model


def shard(model: PreTrainedModel, sharding: Sharding) -> None:
    """Cuts every transformer block, and what is left as one more unit, in place, and gives every process its part of
    the first one's weights and all of its buffers."""
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    device = torch.device(sharding.mesh.device_type)
    for name, buffer in model.named_buffers():
        sent = buffer.to(device)
        dist.broadcast(sent, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, sent)
    generation = [model.generation_config]  # names the tokens that end a completion
    dist.broadcast_object_list(generation, src=0)
    model.generation_config = generation[0]
    offload: OffloadPolicy = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype)
    for unit in (*transformer_blocks(model), model):
        fully_shard(unit, mesh=sharding.mesh, mp_policy=precision, offload_policy=offload)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Whole parameters on every process, gathered once: inside, processes may make different numbers of forward passes
    without waiting for each other. Does nothing for a model that is not sharded."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(unit is not model, recurse=False)
            unit.reshard()


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole weights on the CPU, in the first process; elsewhere an empty dict. Every process must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))


def load_whole_state_dict(model: nn.Module, weights: dict[str, Any]) -> None:
    """Gives a model, sharded or not, the whole weights, which every process brings."""
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def whole_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """A model that is not sharded itself; of one that is, a whole copy on the CPU in the first process and None
    elsewhere. Every process must call it."""
    if not is_sharded(model):
        return model if not dist.is_initialized() or dist.get_rank() == 0 else None
    weights = whole_state_dict(model)
    if dist.get_rank() != 0:
        return None
    from transformers import AutoModelForCausalLM

    copy: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    if has_adapters(model):
        copy.add_adapter(model.peft_config["default"])
    copy.load_state_dict(weights)
    copy.generation_config = model.generation_config
    return copy
