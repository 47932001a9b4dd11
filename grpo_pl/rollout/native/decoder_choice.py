"""Chooses the decoder of a policy, the kernel in C or torch, by processor and model; a run keeps its choice."""

from __future__ import annotations

import os
from typing import Any

import torch

from grpo_pl.functional import accelerated
from grpo_pl.functional.accelerated import SWITCH, has_triton
from grpo_pl.rollout.native.weights import decoded_part, refuse_llama_family
from grpo_pl.types import SamplingParams

TORCH = "torch"
"""Name of the own forward pass in torch, beside those of the kernels."""
WIDEST: dict[str, int] = {
    "avx512": 576,  # AMD Zen 4, as below, 64: 0.10 → 0.027, 128: 0.33 → 0.094, 256: 1.05 → 0.59, 576: 6.7 → 5.2
    "avx2": 576,  # AMD Zen 3, seconds of a thread, 64: 0.17 → 0.034, 128: 0.50 → 0.13, 256: 1.33 → 0.70, 576: 9.0 → 6.2
    "neon": 256,  # checked under an emulator and not timed: a width at which both others need little over half the time
    "sse2": 0,  # for tests
}
"""Widest hidden size at which the kernel of an instruction set is known to draw faster than torch: 64 rows of 64 tokens
behind prompts of 64 (576: of 17 or 24 behind 60), torch → kernel. ``benchmarks/decoders.py`` measures both by width."""


def default_decoder(model: Any) -> str:
    """The decoder of ``model``, of the Llama family: one of this machine's `built_kernels` by name, or ``TORCH``; a
    ValueError says that the environment asks for a kernel that is not there."""
    asked, kernels = os.environ.get(SWITCH), accelerated.built_kernels()
    if asked:
        if asked != TORCH and asked not in kernels:
            raise ValueError(f"{SWITCH} is {asked!r}: here it can be {', '.join([TORCH, *kernels])}.")
        return asked
    fastest = next(iter(kernels), TORCH)  # no slower one: torch uses the instructions of the fastest as well
    return fastest if decoded_part(model).config.hidden_size <= WIDEST.get(fastest, 0) else TORCH


def choose_decoder(
    model: Any, sampling: SamplingParams, *, stop_strings: bool, recorded: str | None = None
) -> tuple[str, str | None]:
    """The decoder of a request, and the reason if that is not the kernel that one could expect.

    Args:
        stop_strings: texts may end completions.
        recorded: the run's decoder, if it has one.
    """
    name, refusal = recorded or default_decoder(model), _refuse(model, sampling, stop_strings=stop_strings)
    if refusal is not None:
        return TORCH, None if name == TORCH else refusal
    if name == TORCH and not accelerated.built_kernels() and not os.environ.get(SWITCH):
        return TORCH, "is missing: the installation found no C compiler, or is older than the sources"
    if name != TORCH and name not in accelerated.built_kernels():
        return TORCH, f"for {name}, which this run draws with elsewhere, is missing: samples are equal up to near-ties"
    return name, None


def decoder_for_run(
    model: Any, sampling: SamplingParams, *, stop_strings: bool, recorded: str | None
) -> tuple[str, str | None]:
    """The decoder of a run on this machine, and a line for the log if it is not the one that it drew with before.

    Args:
        recorded: the decoder that it drew with before; None if it begins.
    """
    if recorded is not None:
        return resumed_decoder(recorded, model)
    if refuse_llama_family(model, length=1) is not None:
        return TORCH, None
    return choose_decoder(model, sampling, stop_strings=stop_strings)[0], None


def resumed_decoder(recorded: str, model: Any) -> tuple[str, str | None]:
    """The decoder of a policy that drew with ``recorded`` before, and a line for the log if it is another one."""
    asked = os.environ.get(SWITCH)
    if not asked and recorded in (TORCH, *accelerated.built_kernels()):
        return recorded, None
    name = default_decoder(model)
    if name == recorded:
        return name, None
    why = f"{SWITCH} says so" if asked else "this machine does not have it"
    line = f"the run drew with {recorded}, and goes on with {name}, since {why}: samples are equal up to near-ties."
    return name, line


def refuse_kernel(model: Any, *, length: int) -> str | None:
    """The reason why the kernel would not compute what ``model`` does; None if it does.

    Args:
        length: most tokens of a sequence.
    """
    reason = refuse_llama_family(model, length=length)
    return _refuse_type(model) if reason is None else f"cannot compute this policy: {reason}"


def _refuse_type(model: Any) -> str | None:
    device, dtypes = model.device.type, {parameter.dtype for parameter in model.parameters()}
    if torch.is_autocast_enabled(device):
        dtypes = {torch.get_autocast_dtype(device)}
    if device != "cpu" or dtypes != {torch.float32}:
        types = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"computes in float32 on CPUs, and the policy in {types} on {device}"
    activation = decoded_part(model).config.hidden_act
    return None if activation in ("silu", "swish") else f"has no activation {activation}"


def _refuse(model: Any, sampling: SamplingParams, *, stop_strings: bool) -> str | None:
    """The reason why the kernel hands a request over to torch, for a model of the Llama family; None if it does not."""
    if (reason := _refuse_type(model)) is not None:
        return reason
    if stop_strings:
        return "knows no stop strings"
    if sampling.temperature != 0.0 and (sampling.top_k or sampling.top_p < 1.0):
        return "knows no top_k and top_p"
    if sampling.temperature != 0.0 and (sampling.sampling_mask or sampling.top_logprobs):
        return "records no likeliest tokens"
    return None


def decodes_in_graphs(model: Any) -> bool:
    """True if rollouts of ``model`` can run on the `GraphDecoder`: on a GPU with Triton, in float32 or narrower."""
    return has_triton(model.device) and model.dtype != torch.float64
