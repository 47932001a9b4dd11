"""Says where kernels in Triton run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """True on a GPU where Triton is installed, as it is with torch on Linux."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
