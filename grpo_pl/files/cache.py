"""The folder of results that are kept between runs, each made by one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock


def cache_root() -> Path:
    """``$GRPO_PL_CACHE``, by default ``~/.cache/grpo_pl``.

    Raises:
        ValueError: it is no folder.
    """
    root = Path(os.environ.get("GRPO_PL_CACHE") or Path.home() / ".cache" / "grpo_pl")
    if root.exists() and not root.is_dir():
        raise ValueError(f"GRPO_PL_CACHE is {str(root)!r}, which is no folder.")
    return root


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Context manager: processes with the same ``path`` wait until the one inside has left or died. On a file system
    without locks nobody waits."""
    lock = FileLock(path, fallback_to_soft=False)
    with suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
