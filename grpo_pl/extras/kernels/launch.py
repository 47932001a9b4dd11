"""How kernels are started: on which device, and on how much of the LM head at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

CHUNK_TOKENS = 2048
"""Most tokens whose logits are in memory at a time …"""
CHUNK_ELEMENTS = 1 << 28
"""… and most logits, in the type of the products: 512 MiB in bfloat16."""


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Context in which kernels run on the device of ``tensor``: Triton starts them on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
