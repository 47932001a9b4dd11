"""Says where kernels in Triton run, and how much of the LM head they compute at a time."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

CHUNK_TOKENS = 2048
"""Most tokens whose logits are in memory at a time …"""
CHUNK_ELEMENTS = 1 << 28
"""… and most logits, in the type of the products: 512 MiB in bfloat16."""


def has_triton(device: torch.device) -> bool:
    """True on a GPU where Triton is installed, as it is with torch on Linux."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
