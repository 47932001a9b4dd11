"""``PushedFiles``: weights in files of a folder that servers see, there for one push alone."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

_LOCK = re.compile(r"grpo_pl-[0-9a-f]{32}-\d+\.lock")


class PushedFiles:
    """Context manager: its files are removed at its end, and those that killed runs have left at its beginning.

    A push has a file that it locks (``flock``), and the lock ends with its process: where there is none, nobody uses
    the files beside it.

    Args:
        session: the run's name for its servers, 32 digits of base 16.
        who: number of this process among those of the run.
    """

    def __init__(self, folder: Path, session: str, who: str) -> None:
        self.names: list[str] = []
        self._folder, self._stem = folder, f"grpo_pl-{session}-{who}"

    def write(self, data: bytes) -> None:
        """Writes the next file."""
        self.names.append(f"{self._stem}-{len(self.names):04}.safetensors")
        (self._folder / self.names[-1]).write_bytes(data)

    def __enter__(self) -> Self:
        for lock in self._folder.iterdir():
            if _LOCK.fullmatch(lock.name):
                with suppress(OSError):  # in use, gone by now, another user's, or there are no locks here
                    _remove_unused(lock)
        self._lock = _locked(self._folder / f"{self._stem}.lock")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            _remove(self._folder / f"{self._stem}.lock")


def _locked(path: Path) -> IO[bytes]:
    while True:
        file = path.open("wb")
        with suppress(OSError):  # there are no locks here, and others remove nothing
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another run took it for left before it was locked


def _remove_unused(lock: Path) -> None:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(lock)
    finally:
        os.close(descriptor)


def _remove(lock: Path) -> None:
    """The files of a push, and then what says whose they are."""
    for file in lock.parent.glob(f"{lock.stem}-*.safetensors"):
        file.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
