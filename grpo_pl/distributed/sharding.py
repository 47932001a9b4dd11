"""Shards a policy with FSDP2, gathers it for a rollout, and makes a whole copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo_pl.policy.inputs import read_within_forward, reading_of
from grpo_pl.policy.lora import has_adapters
from grpo_pl.policy.weights import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Settings of the sharding: the processes, and the types of parameters and gradients."""

    mesh: DeviceMesh
    """One-dimensional mesh of the processes that share the policy."""
    param_dtype: torch.dtype | None
    """Type of gathered parameters and of the computation; None keeps that of the weights."""
    reduce_dtype: torch.dtype | None
    """Type in which gradients are summed over processes."""
    cpu_offload: bool
    """Keep shards, gradients and optimiser state in CPU memory."""


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, of one that reads more than text those of its language model: the items of the
    ``ModuleList`` with the most parameters; empty if there is none."""
    part: Any = model if reading_of(model) is None else cast("PreTrainedModel", model).get_decoder()
    lists = [module for module in part.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())
    return list(largest.children())


def build_once(build: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """``build()`` on rank 0; on other ranks the same architecture with uninitialised weights, which `shard` fills."""
    if dist.get_rank() == 0:
        return build()
    with torch.device("meta"):
        model = build(weights=False)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model


def shard(model: PreTrainedModel, sharding: Sharding) -> None:
    """Shards a model in place, each transformer block as one FSDP unit and the rest as another; every rank gets its
    part of rank 0's weights, and all of its buffers and generation settings, and trains the same weights. Every process
    must call it."""
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    device = torch.device(sharding.mesh.device_type)
    for name, buffer in model.named_buffers():
        sent = buffer.to(device)
        dist.broadcast(sent, src=0)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, sent)
    told: list[Any] = [
        getattr(model, "generation_config", None),  # names the tokens that end a completion; a classifier has none
        {name for name, weight in model.named_parameters() if not weight.requires_grad},
    ]
    dist.broadcast_object_list(told, src=0)
    if hasattr(model, "generation_config"):
        model.generation_config = told[0]
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in told[1])
    offload: OffloadPolicy = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=sharding.param_dtype, reduce_dtype=sharding.reduce_dtype)
    for unit in (*transformer_blocks(model), model):
        fully_shard(unit, mesh=sharding.mesh, mp_policy=precision, offload_policy=offload)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    if reading_of(model) is not None:
        read_within_forward(model)
        if sharding.param_dtype is not None:  # a buffer, of which FSDP2 makes no copy in this type
            head: Any = model.get_output_embeddings()
            head.bias = head.bias.to(sharding.param_dtype)


def whole_again(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a sharded model that `shard` can shard: whole on rank 0, without its weights on others, as `build_once`
    makes it. Every process must call it."""
    whole = whole_model(model)

    def build(*, weights: bool = True) -> PreTrainedModel:
        if weights:
            return cast("PreTrainedModel", whole)
        made = type(model)(model.config)
        if (reading := reading_of(model)) is not None:
            reading.prepare(made)
        return made

    return build_once(build)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that does not learn; of a sharded model as `whole_again` makes it, on every process."""
    copied = whole_again(model) if is_sharded(model) else copy.deepcopy(model)
    return copied.requires_grad_(False).eval()


@contextmanager
def gathered(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within it every process holds the whole parameters, so that processes may run different numbers
    of forward passes without waiting for each other. Does nothing for a model that is not sharded."""
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


def trainable_parts(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters, of a sharded model this rank's parts of them: what a forward pass gathered is freed."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """This process's part of a weight, which may be sharded."""
    return weight.to_local() if isinstance(weight, DTensor) else weight.data


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole weights on the CPU on rank 0, an empty dict on other ranks. Every process must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))


def load_whole_state_dict(model: nn.Module, weights: dict[str, Any]) -> None:
    """Loads whole weights into a model, sharded or not; every process must call it with the same ``weights``."""
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def whole_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """The whole model on rank 0, and None on other ranks: the model itself if it is not sharded, else a copy of it on
    the CPU. Every process must call it."""
    if not is_sharded(model):
        return model if not dist.is_initialized() or dist.get_rank() == 0 else None
    weights = whole_state_dict(model)
    if dist.get_rank() != 0:
        return None
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reading = reading_of(model)
    kind = AutoModelForCausalLM if reading is None else AutoModelForImageTextToText
    copy: PreTrainedModel = kind.from_config(model.config, dtype=model.dtype)
    if reading is not None:
        reading.prepare(copy)
    if has_adapters(model):
        copy.add_adapter(model.peft_config["default"])
    copy.load_state_dict(weights)
    copy.generation_config = model.generation_config
    return copy
