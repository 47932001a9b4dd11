"""One process at a time writes in a folder, by a lock that the system releases however that process ends."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
"""File in a run's folder while a process writes there; it names the process."""


class FolderLock:
    """Held from `take` to `release` or the end of the process, SIGKILL included. No process that is
    started or forked meanwhile keeps it.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file: IO[str] | None = None

    def take(self) -> str:
        """Takes the lock.

        Returns:
            Why this file system has no locks, where that is so; empty otherwise.

        Raises:
            ValueError: another process holds it; says which, where and since when.
        """
        if sys.platform == "win32":
            return "Windows has no flock"
        while self._file is None:
            file = self.path.open("a+", encoding="utf-8")  # not inherited by programs that are started
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise ValueError(f"{self.path.parent} is in use by {_holder(file)}: wait for its end.") from None
            except OSError as error:  # such as a network file system without locks
                file.close()
                self.path.unlink(missing_ok=True)
                return error.strerror or str(error)
            if self._is_there(file):
                self._file = file
            else:  # its holder removed it between our opening and locking it
                file.close()
        os.register_at_fork(after_in_child=self._forget)
        self._file.truncate(0)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # a full disk: the lock holds all the same
            json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, self._file)
            self._file.flush()
        return ""

    def release(self) -> None:
        """Frees the lock, if it is held."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._forget()

    def _is_there(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _forget(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        told: dict[str, Any] = json.load(file)
        return f"process {told['pid']} on {told['host']} since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Processes that come with the same ``path`` wait until the one in the block is through, or has died. Where the
    file system has no locks, nobody waits."""
    with path.open("a", encoding="utf-8") as file:
        if sys.platform != "win32":
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
