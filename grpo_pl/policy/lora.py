"""Low-rank adapters (Hu et al., arXiv:2106.09685) with ``peft``: small trained matrices added to frozen weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.files.rows import read_object
from grpo_pl.policy.inputs import auto_class, reading_of
from grpo_pl.policy.library_internals import is_adapted
from grpo_pl.policy.quantization import is_quantized, plain, plain_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTERS = "adapter_config.json"
"""File in a folder of adapters, which names the model that they belong to."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """W x becomes W x + (alpha / rank) · B A x, with W frozen, A random and B zero at the start."""

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """Scale of the adapters' contribution, see the formula."""
    targets: list[str] | None = None
    """Names of the layers that get an adapter, such as q_proj; null takes all linear ones but the output head and those
    that share their weight. An output head or embedding must not be tied to the other."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"policy.lora needs rank >= 1 and alpha > 0, got {self.rank} and {self.alpha}.")


def add_adapters(model: PreTrainedModel, lora: Lora, *, seed: int) -> None:
    """Freezes ``model`` and adds adapters to its linear layers, in place; at first the output is the same.

    Raises:
        ImportError: peft is not installed.
        ValueError: no layer has one of the names in ``targets``, one of them cannot have an adapter or shares its
            weight with another layer, or transformers refuses the installed peft.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("policy.lora needs the package peft: pip install 'grpo_pl[lora]'.") from error
    unfit = _unfit(model)
    fitting = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    named = [name for name in unfit for target in lora.targets or () if _is_named(name, target)]
    if named:
        raise ValueError(
            f"policy.lora.targets: {named[0]} of {type(model).__name__} is no plain linear layer in use: an adapter "
            "beside it would break it or do nothing. Leave it out."
        )
    shared = _shared(model)
    tied = next((name for name in shared for target in lora.targets or () if _is_named(name, target)), None)
    if tied is not None:
        raise ValueError(
            f"policy.lora.targets: {tied} of {type(model).__name__} shares its weight with {shared[tied]}, and merged "
            "weights could not hold an adapter of one of them alone. Leave it out, or take a model that has both "
            "weights (tie_word_embeddings: false)."
        )
    if lora.targets is None:
        head = model.get_output_embeddings()  # peft leaves it out
        layers = ((name, model.get_submodule(name)) for name in shared)
        unfit += [name for name, layer in layers if isinstance(layer, torch.nn.Linear) and layer is not head]
        if reading_of(model) is not None:  # of which the language model alone gets adapters
            inner = set(map(id, model.get_decoder().modules()))
            linear = (pair for pair in model.named_modules() if isinstance(pair[1], torch.nn.Linear))
            unfit += [name for name, layer in linear if id(layer) not in inner and layer is not head]
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
    adapted = [name for name, _ in _adapted(model)]
    for target in lora.targets or ():
        # peft takes out those that stand for a part of fused experts
        if target in config.target_modules and not any(_is_named(name, target) for name in adapted):
            near = get_close_matches(target, {name.rpartition(".")[2] for name in fitting}, n=1)
            raise ValueError(
                f"policy.lora.targets: no layer of {type(model).__name__} has the name {target!r}"
                f"{f'; did you mean {near[0]}?' if near else '.'}"
            )


def _is_named(name: str, target: str) -> bool:
    """True if peft takes a layer for one that ``target`` names: by its whole name, or the last parts of it."""
    return f".{name}".endswith(f".{target}")


def _shared(model: PreTrainedModel) -> dict[str, str]:
    """Names of layers whose weight another layer uses as well, each with the name of such another."""
    owners: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(weight), []).append(name.rpartition(".")[0])
    return {name: others[others[0] == name] for others in owners.values() if len(others) > 1 for name in others}


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


def base_of(source: str) -> str:
    """The model that a folder of adapters belongs to, as its ``adapter_config.json`` says; of another model itself.

    Raises:
        ValueError: the file names none, or adapters that cannot be added to weights.
    """
    file = Path(source) / ADAPTERS
    if not file.is_file():
        return source
    settings = read_object(file)
    more = [name for name in ("use_dora", "lora_bias", "modules_to_save") if settings.get(name)]
    if settings.get("peft_type") != "LORA" or more or settings.get("bias", "none") != "none":
        raise ValueError(
            f"{file}: only plain LoRA can be merged, this is {' with '.join([str(settings.get('peft_type')), *more])}."
        )
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or (Path(base) / ADAPTERS).is_file():
        raise ValueError(f"{file}: base_model_name_or_path must name a whole model, got {base!r}.")
    return base


def merged(model: PreTrainedModel, kind: Any = None, **options: Any) -> PreTrainedModel:
    """A copy on the CPU without adapters, with W + (alpha / rank) · B A as its weights; ``options`` of its making.

    Args:
        kind: class of transformers that makes it; by default that of the model.

    Raises:
        ValueError: a layer with adapters shares its weight with another layer, which they would change too.
    """
    kind = kind or auto_class(images=reading_of(model) is not None)
    copy: PreTrainedModel = kind.from_config(plain_config(model.config), dtype=model.dtype, **options)
    shared = _shared(copy)  # of the copy: transformers unties a base as it loads its adapters
    tied = next((name for name, _ in _adapted(model) if name in shared), None)
    if tied is not None:
        raise ValueError(
            f"the adapters of {tied} cannot be merged: {type(model).__name__} has one weight for it and "
            f"{shared[tied]}. Train them on a base that has both weights (tie_word_embeddings: false)."
        )
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
