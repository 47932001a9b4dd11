"""Settings of glibc's malloc for this process; nothing happens where the C library is another one."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
MIB = 2**20


def keep_freed_memory() -> None:
    """Keeps up to 512 MiB that were freed, in pieces of at most 32 MiB, for what is allocated next. By default malloc
    returns them and asks for new pages: a tenth of the time of a small policy's update on a CPU."""
    _call("mallopt", _MMAP_THRESHOLD, 32 * MIB)  # glibc allows no more
    _call("mallopt", _TRIM_THRESHOLD, 512 * MIB)


def share_arenas() -> None:
    """Limits malloc to two arenas for all threads, so that memory which one frees serves another."""
    _call("mallopt", _ARENA_MAX, 2)


def give_back_memory() -> None:
    """Returns freed memory to the system; malloc would keep a part of what large objects took."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
