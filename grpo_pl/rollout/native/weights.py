"""Reads a policy's weights for decoding: checks the model, merges adapters and fuses layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_pl.policy.library_internals import (
    changes_more_than_weights,
    has_hooks,
    is_adapted,
    unmerged_adapters,
    unwrap,
)
from grpo_pl.policy.weights import whole

_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # the others change with the length that was seen


def linear_parts(modules: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weight (out, in) and bias of each linear layer; active LoRA adapters are merged into a copy."""
    weights, biases = list[Tensor](), list[Tensor | None]()
    for module in modules:
        base = module.base_layer if is_adapted(module) else module
        weight = whole(base.weight)
        biases.append(None if base.bias is None else whole(base.bias))
        for adapter in unmerged_adapters(module):
            weight = weight + module.get_delta_weight(adapter).detach()
        weights.append(weight)
    return weights, biases


def fused_linear(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """`linear_parts` of layers with one input as one product, weight (out, in) and bias."""
    weights, biases = linear_parts(modules)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    filled = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
    return weight, torch.cat(filled)


def refuse_llama_family(model: Any, *, length: int) -> str | None:
    """The reason why the own forward pass of the Llama family would not compute what ``model`` does; None if it does.

    Args:
        length: tokens of the longest prompt and its completion.
    """
    from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt-learning adapters change the input"
    model = unwrap(model)
    families = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
    if not any(_computes_like(model, family) for family in families):
        return f"its architecture {type(model).__name__} has no own forward pass here"
    config, rope = model.config, model.config.rope_parameters
    if rope.get("rope_type", "default") not in _STATIC_ROTARY:
        return f"its rotary embedding of type {rope['rope_type']!r} depends on the length seen"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding turns only a part of each head"
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    windows.append(getattr(config, "sliding_window", None) if config.model_type == "mistral" else None)
    if any(window is not None and window < length for window in windows):
        return f"{length} tokens exceed its sliding attention window"
    return _refuse_parts(model)


def _refuse_parts(model: Any) -> str | None:
    """Checks every weight that the own forward pass reads, and hooks that could change a module from outside."""
    linears = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    for linear in linears:
        if is_adapted(linear):
            if changes_more_than_weights(linear):
                return "its LoRA adapters use DoRA or a bias"
            if linear.base_layer.weight.dtype not in (torch.float32, torch.float64) and unmerged_adapters(linear):
                return "merging LoRA adapters into weights of low precision would round them away"
            linear = linear.base_layer
        if not _computes_like(linear, nn.Linear):
            return f"its linear layers are wrapped as {type(linear).__name__}"
    if not _computes_like(model.model.embed_tokens, nn.Embedding):
        return f"its embedding is wrapped as {type(model.model.embed_tokens).__name__}"
    for module in model.modules():
        gathers = hasattr(module, "unshard")  # FSDP's own hooks do nothing else
        if "forward" in vars(module) or (has_hooks(module) and not gathers):
            return f"hooks or patches may change its {type(module).__name__}"
    return None


def _computes_like(model: Any, family: type[nn.Module]) -> bool:
    """An instance whose class, FSDP's generated ones included, kept the family's forward."""
    return isinstance(model, family) and type(model).forward is family.forward
