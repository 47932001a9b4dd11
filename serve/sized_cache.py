"""``SizedCache``: keeps what was used last, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """A dictionary whose values have sizes; when their sum exceeds ``most_bytes``, the least recently used ones go."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of ``key``, which counts as used now; None if there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Adds a value, or changes it and its size; one that is larger than the cache is not kept."""
        self.discard(key)
        self._entries[key] = value, size
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.discard(next(iter(self._entries)))

    def clear(self) -> None:
        """Removes all values."""
        self._entries.clear()
        self.bytes = 0

    def discard(self, key: K) -> None:
        """Removes a value if it is there."""
        self.bytes -= self._entries.pop(key, (None, 0))[1]
