"""Says where kernels in Triton run."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec

import torch

SWITCH = "GRPO_PL_NATIVE"
"""Environment variable that names the kernels of CPUs; ``torch`` switches them off, and those of GPUs."""


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
    from grpo_pl.functional.kernels.gated import SiluProduct

    try:
        one = torch.ones(16, device=device)
        SiluProduct.apply(one, one)  # type: ignore[no-untyped-call]
    except Exception as problem:  # a machine without a C compiler, say: Triton needs one, and has many errors
        warnings.warn(f"kernels in Triton do not compile here, so torch computes: {problem}", stacklevel=2)
        return "they do not compile: " + " ".join(str(problem).split())[:200]
    return None
