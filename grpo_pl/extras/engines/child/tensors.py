"""Tensors that are handed to a child process through memory that both map."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; every type of tensor may begin there

Placed = tuple[str, torch.dtype, tuple[int, ...], int]
"""A tensor in shared memory: its name, type and shape, and the bytes before it."""


class SharedMemory:
    """Anonymous memory that two processes map: it vanishes with them, however they end.

    Args:
        descriptor: of the other process's, which is inherited; None makes new memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("grpo_pl-weights")
        elif descriptor is None:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    def write(self, tensors: Mapping[str, Tensor]) -> list[Placed]:
        """Copies tensors into it, in the place of those before, and tells where they are."""
        placed: list[Placed] = []
        end = 0
        for name, tensor in tensors.items():
            placed.append((name, tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if os.fstat(self.descriptor).st_size < end:
            os.ftruncate(self.descriptor, end)
        for place, tensor in zip(placed, tensors.values(), strict=True):
            self._tensor(place).copy_(tensor.detach())
        return placed

    def read(self, placed: Sequence[Placed]) -> dict[str, Tensor]:
        """Copies of the tensors that the other process has written."""
        return {place[0]: self._tensor(place).clone() for place in placed}

    def close(self) -> None:
        self._map = None
        self._finalizer()

    def _tensor(self, placed: Placed) -> Tensor:
        """The memory itself as a tensor."""
        _, dtype, shape, begin = placed
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._map is None or len(self._map) < begin + count * dtype.itemsize:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(shape)
