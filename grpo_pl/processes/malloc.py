"""Settings of glibc's malloc for this process; nothing happens where the C library is another one."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
MIB = 2**20


def keep_freed_memory() -> None:
    """Keeps up to 512 MiB that were freed, in pieces of at most 32 MiB, for what is allocated next. By default malloc
    returns them and asks for new pages: a tenth of the time of a small policy's update on a CPU."""
    if (mallopt := getattr(_library(), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, 32 * MIB)  # glibc allows no more
        mallopt(_TRIM_THRESHOLD, 512 * MIB)


def share_arenas() -> None:
    """Limits malloc to two arenas for all threads, so that memory which one frees serves another."""
    if (mallopt := getattr(_library(), "mallopt", None)) is not None:
        mallopt(_ARENA_MAX, 2)


def give_back_memory() -> None:
    """Returns freed memory to the system; malloc would keep a part of what large objects took."""
    if (trim := getattr(_library(), "malloc_trim", None)) is not None:
        trim(0)


def _library() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
