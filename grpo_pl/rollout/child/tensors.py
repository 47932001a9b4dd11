"""Tensors that are handed to a child process through memory that both map."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; every type of tensor may begin there


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A tensor's place in shared memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes before it."""
    size: int
    """Bytes that it takes."""


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

    def ensure(self, size: int) -> None:
        """Makes it at least ``size`` bytes large."""
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def bytes_at(self, offset: int, size: int) -> Tensor:
        """(size,) uint8, which is that memory."""
        if self._map is None or len(self._map) < offset + size:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)

    def close(self) -> None:
        self._map = None
        self._finalizer()


def buckets(weights: Iterable[tuple[str, Tensor]], memory: SharedMemory, size: int) -> Iterator[list[Placed]]:
    """Copies tensors into shared memory, as many at a time as fit into ``size`` bytes, a larger one alone. Each list
    must be taken before the next is asked for."""
    placed: list[Placed] = []
    end = 0
    for name, tensor in weights:
        amount = tensor.numel() * tensor.element_size()
        if placed and end + amount > size:
            yield placed
            placed, end = [], 0
        if amount:
            memory.ensure(max(size, end + amount))
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            memory.bytes_at(end, amount).copy_(flat)
        placed.append(Placed(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=end, size=amount))
        end += -(-amount // _ALIGNMENT) * _ALIGNMENT
    if placed:
        yield placed


def unpacked(placed: Iterable[Placed], memory: SharedMemory) -> Iterator[tuple[str, Tensor]]:
    """Copies of the tensors of one bucket."""
    for part in placed:
        if not part.size:
            yield part.name, torch.empty(part.shape, dtype=part.dtype)
            continue
        yield part.name, memory.bytes_at(part.offset, part.size).clone().view(part.dtype).reshape(part.shape)
