"""A policy's weights by their names in checkpoints: read one module at a time, and loaded whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_pl.policy.library_internals import checkpoint_names, persistent_tensors, unwrap
from grpo_pl.policy.lora import has_adapters, merged_weights
from grpo_pl.policy.pretrained import report_kept, shapes_of, unlike
from grpo_pl.policy.quantization import plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole(weight: Tensor) -> Tensor:
    """The full tensor of a weight that may be sharded; every rank must call it, because gathering is collective."""
    weight = weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of names, types, shapes and bytes of tensors, in the order of their names; 64 hexadecimal digits. A
    policy and a checkpoint of it have the same one, however it is sharded. Every rank must call it, because gathering
    is collective."""
    known: dict[tuple[int, torch.Size], str] = {}
    lines = []
    for name, weight in sorted(weights, key=lambda named: named[0]):
        tied = None if hasattr(weight, "full_tensor") or not weight.numel() else (weight.data_ptr(), weight.shape)
        found = known.get(tied) if tied is not None else None
        if found is None:
            found = hashlib.sha256(_bytes_of(whole(weight))).hexdigest()
        if tied is not None:
            known[tied] = found
        lines.append(f"{name} {weight.dtype} {tuple(weight.shape)} {found}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that the files of weights in a folder hold."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, tensors.get_tensor(name)


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2 has sharded the model, so that reading its weights needs all processes."""
    return isinstance(model, FSDPModule)


@torch.no_grad()
def checkpoint_weights(model: PreTrainedModel, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every weight, with the names that ``save_pretrained`` writes; tied weights occur once.

    Only the weights of one module are gathered at a time. Quantized weights come as the numbers that they stand for.
    Every rank must consume the iterator if the model is sharded.

    Args:
        merge: LoRA adapters are merged, W + (alpha / rank) · B A; false gives them beside their bases, by the names
            that all weights have in a model with these adapters.
    """
    model = unwrap(model)
    weights = ((name, plain(weight).detach()) for name, weight in persistent_tensors(model))
    if not merge and has_adapters(model):
        yield from ((name, whole(weight)) for name, weight in weights)
        return
    for _, module in groupby(merged_weights(model, weights), key=lambda named: named[0].rpartition(".")[0]):
        yield from checkpoint_names(model, {name: whole(weight) for name, weight in module}).items()


def bucketed(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Weights, as many at a time as fit into ``size`` bytes, a larger one alone."""
    bucket: dict[str, Tensor] = {}
    end = 0
    for name, tensor in weights:
        if bucket and end + tensor.nbytes > size:
            yield bucket
            bucket, end = {}, 0
        bucket[name] = tensor
        end += tensor.nbytes
    if bucket:
        yield bucket


def from_weights(kind: Any, weights: Mapping[str, Tensor], **options: Any) -> Any:
    """A model of transformers with weights that have the names of its checkpoints, all of which must be there."""
    with report_kept():
        model, found = kind.from_pretrained(
            None,
            state_dict=weights,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **options,
        )
    if fault := unlike(found["missing_keys"], found["unexpected_keys"], shapes_of(found)):
        raise ValueError(f"these are not the weights of a {kind.__name__}: {fault}.")
    return model


def lacking(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The tensors of ``model`` that a checkpoint of these ``names`` lacks; of tied weights it needs one name only, and
    buffers that are not persistent are in no checkpoint."""
    own, given = model.state_dict(keep_vars=True), set(names)
    there = {id(tensor) for name, tensor in own.items() if name in given}
    return [name for name, tensor in own.items() if id(tensor) not in there]


def load_whole(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """``model.load_state_dict`` for weights that must be all there, but for further names of tied ones.

    Raises:
        ValueError: one line that names what is missing, has another shape, or has no place in the model.
    """
    own = model.state_dict()
    shapes = {
        name: (tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__, tuple(own[name].shape))
        for name, given in weights.items()
        if name in own
    }
    different = {name: (theirs, ours) for name, (theirs, ours) in shapes.items() if theirs != ours}
    if fault := unlike(lacking(model, weights), [name for name in weights if name not in own], different):
        raise ValueError(f"these are not the weights of a {type(model).__name__}: {fault}.")
    model.load_state_dict(weights, strict=False)
