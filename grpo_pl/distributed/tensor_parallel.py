"""Tensor parallelism: splits every layer of a Llama-like policy over processes, within the shards of FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from grpo_pl.policy.lora import has_adapters
from grpo_pl.policy.weights import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linear maps of a layer whose outputs are split: each process computes some heads, and some units of the MLP."""
BY_INPUT = ("o_proj", "down_proj")
"""Linear maps that take those parts in, and whose outputs are summed over the processes."""
REPLICATED = ("input_layernorm", "post_attention_layernorm")
"""Parts of a layer that every process computes as a whole, and whose gradients are equal everywhere."""
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_layers(model: PreTrainedModel, blocks: list[nn.Module], size: int) -> None:
    """Refuses a policy whose layers cannot be split among ``size`` processes."""
    known = {*BY_OUTPUT, *BY_INPUT, *REPLICATED}
    owners = {name.split(".")[-2] for block in blocks for name, _ in block.named_parameters() if "." in name}
    if not blocks or has_adapters(model) or owners - known:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {size}, which goes with whole policies of the form of Llama, "
            f"Mistral or Qwen2, not with {', '.join(sorted(owners - known)) or 'this one'}: set it to 1."
        )
    for name in DIVIDED:
        if (count := getattr(model.config, name)) % size:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size is {size}, which does not divide the policy's {name}, {count}: "
                "set it to a common divisor of heads, key-value heads and the MLP's width."
            )


def split_layers(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Splits the layers in place (Megatron-LM, arXiv:1909.08053, section 3); embeddings, norms and head stay whole.

    The processes of a mesh must run the same forward and backward passes on the same tokens.
    """
    for block in blocks:
        plan: dict[str, ParallelStyle] = {
            name: ColwiseParallel() if leaf in BY_OUTPUT else RowwiseParallel()
            for name, _ in block.named_modules()
            if (leaf := name.rpartition(".")[2]) in (*BY_OUTPUT, *BY_INPUT)
        }
        parallelize_module(block, mesh, plan, src_data_rank=None)  # the weights come later


@torch.no_grad()
def whole_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a split model that one process runs alone; all processes that share its layers must call it."""
    with torch.device("meta"):
        copy: PreTrainedModel = type(model)(model.config)
    weights = {name: whole(weight) for name, weight in model.named_parameters()}
    copy.load_state_dict(weights, strict=False, assign=True)
    copy.tie_weights()
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(copy.get_submodule(owner), leaf, buffer)
    copy.generation_config = model.generation_config
    return copy.train(model.training).requires_grad_(False)
