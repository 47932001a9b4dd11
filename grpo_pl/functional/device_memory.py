"""Free memory, and errors that say there is none."""

from __future__ import annotations

import torch


class OutOfMemory(RuntimeError):
    """Memory does not suffice, and nothing is left to halve."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if an allocation failed, on a GPU or, where the system refuses rather than kills, on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_gpu_memory(device: torch.device) -> float | None:
    """Bytes that this process may still take of a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)
