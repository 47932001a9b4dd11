"""Low-rank adapters (Hu et al., arXiv:2106.09685) with ``peft``: small trained matrices added to frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.policy.library_internals import is_adapted
from grpo_pl.policy.quantization import is_quantized, plain, plain_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Lora:
    """W x becomes W x + (alpha / rank) · B A x, with W frozen, A random and B zero at the start."""

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """Scale of the adapters' contribution, see the formula."""
    targets: list[str] | None = None
    """Names of the linear layers that get an adapter, such as q_proj; null takes all but the output head."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"policy.lora needs rank >= 1 and alpha > 0, got {self.rank} and {self.alpha}.")


def add_adapters(model: PreTrainedModel, lora: Lora, *, seed: int) -> None:
    """Freezes ``model`` and adds adapters to its linear layers, in place; at first the output is the same.

    Raises:
        ImportError: peft is not installed.
        ValueError: no layer has one of the names in ``targets``, one of them cannot have an adapter, or transformers
            refuses the installed peft.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("policy.lora needs the package peft: pip install 'grpo_pl[lora]'.") from error
    unfit = _unfit(model)
    named = [name for name in unfit if name.rpartition(".")[2] in (lora.targets or ())]
    if named:
        raise ValueError(
            f"policy.lora.targets: {named[0]} of {type(model).__name__} is no plain linear layer in use: an adapter "
            "beside it would break it or do nothing. Leave it out."
        )
    config = LoraConfig(
        exclude_modules=unfit or None,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.targets or "all-linear",
        lora_dropout=0.0,  # rollout and scoring must use one distribution
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(config)
        except ValueError as error:
            raise ValueError(f"policy.lora: {' '.join(str(error).split())}") from error


def _unfit(model: PreTrainedModel) -> list[str]:
    """Names of linear layers that cannot have an adapter: routers, which return more than a product, and those of Mamba
    blocks whose weight is used without calling the layer."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and not is_quantized(module.weight)
        and (type(module).forward is not torch.nn.Linear.forward or name.endswith("mamba.dt_proj"))
    ]


def has_adapters(model: Any) -> bool:
    """True if any layer of ``model`` has adapters."""
    return any(True for _ in _adapted(model))


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Context manager: within it ``model`` computes without its adapters, which get no gradient. Does nothing for a
    model without adapters."""
    layers = [layer for _, layer in _adapted(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU without adapters, with W + (alpha / rank) · B A as its weights."""
    from transformers import AutoModelForCausalLM

    copy: PreTrainedModel = AutoModelForCausalLM.from_config(plain_config(model.config), dtype=model.dtype)
    packed = {name: plain(weight) for name, weight in model.named_parameters() if is_quantized(weight)}
    copy.load_state_dict(dict(merged_weights(model, {**model.state_dict(), **packed}.items())))
    copy.generation_config = model.generation_config
    return copy


def merged_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``weights`` by the names that they have without adapters, each of which is added to its weight."""
    adapted: dict[str, list[Any]] = {}
    for name, layer in _adapted(model):
        # all experts of a layer may be one 3-D parameter, which peft wraps once for each of its parameters
        key = f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}"
        adapted.setdefault(key, []).append(layer)
    for name, weight in weights:
        if ".lora_" in name:
            continue
        key = name.replace(".base_layer", "")
        for layer in adapted.get(key, ()):
            for adapter in layer.active_adapters:
                weight = (weight.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)
        yield key, weight


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and module of each layer with adapters."""
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))
