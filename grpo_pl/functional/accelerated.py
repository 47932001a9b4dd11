"""The registry of accelerated functions: kernels that compute faster what the core computes in torch.

The core reads a name of this module where it needs it, and the kernel is imported then: so every process finds those
that it runs by itself, a spawned rank, ``grpo-pl validate`` and the server too.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # for type checkers and editors; at run time the table below counts
    from grpo_pl.extras.kernels.decode_kernel import DecodeKernel as DecodeKernel
    from grpo_pl.extras.kernels.decode_kernel import PackedPolicy as PackedPolicy
    from grpo_pl.extras.kernels.decode_kernel import built_kernels as built_kernels
    from grpo_pl.extras.kernels.decode_kernel import draw_rollout as draw_rollout
    from grpo_pl.extras.kernels.fused_modules import fused_forwards as fused_forwards
    from grpo_pl.extras.kernels.fused_modules import patched as patched
    from grpo_pl.extras.kernels.graph_decoder import GraphDecoder as GraphDecoder
    from grpo_pl.extras.kernels.head import FusedHead as FusedHead
    from grpo_pl.extras.kernels.kernel_slots import Draw as Draw
    from grpo_pl.extras.kernels.kernel_slots import KernelSlots as KernelSlots
    from grpo_pl.extras.kernels.race import race as race

_KERNELS = {
    "decode_kernel": "DecodeKernel PackedPolicy built_kernels draw_rollout",  # in C: a rollout
    "kernel_slots": "Draw KernelSlots",  # in C: sequences that join and leave
    "fused_modules": "fused_forwards patched",  # in C or Triton: norms, gates and attention of the update
    "graph_decoder": "GraphDecoder",  # in Triton: a rollout
    "head": "FusedHead",  # in Triton: log-probabilities and entropies of an LM head
    "race": "race",  # in Triton: the draw of a token
}
"""Module of `grpo_pl.extras.kernels` -> what the core uses of it."""
_MODULE_OF = {name: module for module, names in _KERNELS.items() for name in names.split()}
SWITCH = "GRPO_PL_NATIVE"
"""Environment variable that names the kernels of CPUs; ``torch`` switches them off, and those of GPUs."""


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"grpo_pl.extras.kernels.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def has_triton(device: torch.device) -> bool:
    """True on a GPU, an A100 or newer, where Triton is installed, as it is with torch on Linux, and compiles."""
    return device.type == "cuda" and missing_kernels(device) is None


def missing_kernels(device: torch.device) -> str | None:
    """The reason why no kernel in Triton runs on a GPU, so that torch computes, several times slower; None if they
    run, and for other devices."""
    if device.type != "cuda":
        return None
    return f"{SWITCH} is torch" if os.environ.get(SWITCH) == "torch" else _failure(device)


@cache
def _failure(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than an A100"  # the products of kernels are in bfloat16
    from grpo_pl.extras.kernels.gated import SiluProduct

    try:
        one = torch.ones(16, device=device)
        SiluProduct.apply(one, one)  # type: ignore[no-untyped-call]
    except Exception as problem:  # a machine without a C compiler, say: Triton needs one, and has many errors
        warnings.warn(f"kernels in Triton do not compile here, so torch computes: {problem}", stacklevel=2)
        return "they do not compile: " + " ".join(str(problem).split())[:200]
    return None
