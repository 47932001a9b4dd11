"""Switches off what a model does in training mode alone: dropout, layers that are left out, noise in a router."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from grpo_pl.policy.loading import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS, _TOKENS = 2, 8
_PRODUCTS = 2**33  # of a weight and a number, in a row: a model of a billion weights reads 8 tokens, a larger one fewer
_SURE = 0.99  # a rate at which it cannot fail to show


@torch.no_grad()
def switch_noise_off(model: PreTrainedModel) -> None:
    """Has ``model`` compute the same in training as in evaluation mode; rollouts and scoring need one distribution.

    Both modes are tried on two short rows. Where they differ, or random numbers are drawn, each positive number that
    a kind of module or the config holds is tried: if training mode heeds it and evaluation does not, it is set to 0.
    On a device other than a CPU or a CUDA GPU nothing is tried, and a warning says so.

    Raises:
        ValueError: the modes still differ; names the innermost module that does.
    """
    device, training = model.device, model.training
    if device.type not in ("cpu", "cuda"):  # others have no generator for each device (mps), or none (meta)
        warnings.warn(
            f"The policy is on {device}: nobody tried whether training mode adds noise to what it computes.",
            stacklevel=2,
        )
        return
    tokens = min(_TOKENS, context_length(model.config) or _TOKENS, max(2, _PRODUCTS // model.num_parameters()))
    ids = torch.arange(_ROWS * tokens, device=device).view(_ROWS, tokens) % model.get_input_embeddings().weight.shape[0]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices=devices), torch.autocast(device.type, enabled=False):
            evaluated = _logits(model.eval(), ids)
            model.train()
            if not _is_quiet(model, ids, evaluated):
                for holders, name in _numbers(model):
                    before = [getattr(holder, name) for holder in holders]
                    if _is_rate(model, ids, evaluated, holders, name):
                        _set(holders, name, [0.0] * len(holders))
                    else:
                        _set(holders, name, before)
                if not _is_quiet(model.train(), ids, evaluated):
                    name, kind = _culprit(model, ids)
                    raise ValueError(
                        f"{name} ({kind}) of {type(model).__name__} computes something else in training mode than in "
                        "evaluation mode, and no rate that is set to 0 ends that: what is sampled would not be what is "
                        "trained. Train another model."
                    )
    finally:
        model.train(training)


def _is_rate(model: Any, ids: Tensor, evaluated: Tensor, holders: list[Any], name: str) -> bool:
    """True if training mode heeds a number and evaluation does not, which is left at a value that was tried."""
    try:
        _set(holders, name, [0.0] * len(holders))
        if not torch.equal(_logits(model.eval(), ids), evaluated):
            return False
        without = _logits(model.train(), ids)
        _set(holders, name, [_SURE] * len(holders))
        return not torch.equal(_logits(model, ids), without)
    except Exception:  # a model divides by it, or a config refuses the value: a rate may be 0
        return False


def _is_quiet(model: Any, ids: Tensor, evaluated: Tensor) -> bool:
    """True if a model in training mode computes ``evaluated``, whatever random numbers it draws."""
    first, state = _logits(model, ids), _random_state(model)
    second = first if torch.equal(state, _random_state(model, seed=0)) else _logits(model, ids, seed=1)
    spread = evaluated.nan_to_num().std()
    tolerance = (1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05) * float(spread)
    return torch.allclose(first, evaluated, rtol=0.0, atol=tolerance, equal_nan=True) and torch.allclose(
        first, second, rtol=0.0, atol=0.0, equal_nan=True
    )


def _random_state(model: Any, seed: int | None = None) -> Tensor:
    """The state of the generator that ``model`` draws from, or what it is just behind ``seed``."""
    if seed is not None:
        torch.manual_seed(seed)
    return torch.get_rng_state() if model.device.type == "cpu" else torch.cuda.get_rng_state(model.device)


def _logits(model: Any, ids: Tensor, seed: int = 0) -> Tensor:
    """(B, S, V), without a change of the model's buffers."""
    torch.manual_seed(seed)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    logits: Tensor = functional_call(model, buffers, (ids,), {"use_cache": False}).logits
    return logits.float()


def _numbers(model: Any) -> list[tuple[list[Any], str]]:
    """The positive numbers that modules and configs hold, each with all of a class that have it."""
    configs = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    found: dict[tuple[type, str], list[Any]] = {}
    for holder in [*model.modules(), *configs.values()]:
        for name, value in vars(holder).items():
            if isinstance(value, float) and value > 0:
                found.setdefault((type(holder), name), []).append(holder)
    return [(holders, name) for (_, name), holders in found.items()]


def _set(holders: list[Any], name: str, values: list[float]) -> None:
    for holder, value in zip(holders, values, strict=True):
        setattr(holder, name, value)


def _culprit(model: Any, ids: Tensor) -> tuple[str, str]:
    """Name and class of the first module to end its forward pass with another output of the same input."""
    with _passes(model) as evaluated:
        _logits(model.eval(), ids)
    with _passes(model) as trained:
        _logits(model.train(), ids)
    for (name, *before), (_, *after) in zip(evaluated, trained, strict=False):
        same_input, same_output = (
            len(b) == len(a) and all(map(torch.equal, b, a)) for b, a in zip(before, after, strict=True)
        )
        if same_input and not same_output:
            return name or "the model", type(model.get_submodule(name)).__name__
    return "the model", type(model).__name__


@contextmanager
def _passes(model: nn.Module) -> Iterator[list[tuple[str, list[Tensor], list[Tensor]]]]:
    """Context manager: collects the name, input and output of each module in the order in which they end."""
    found: list[tuple[str, list[Tensor], list[Tensor]]] = []
    inputs: list[list[Tensor]] = []

    def tensors(values: Any) -> list[Tensor]:
        return [value.clone() for value in values if isinstance(value, Tensor)]  # which may change in place

    def begin(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        inputs.append(tensors([*args, *named.values()]))

    def end(module: nn.Module, args: Any, output: Any, *, name: str) -> None:
        found.append((name, inputs.pop(), tensors(output if isinstance(output, tuple) else [output])))

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(end, name=name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
