"""Locks a run folder for one process; the system frees the lock however that process ends."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

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
        self._lock = FileLock(self.path, blocking=False, thread_local=False, fallback_to_soft=False)

    def take(self) -> str:
        """Takes the lock.

        Returns:
            Why this file system has no locks, where that is so; empty otherwise.

        Raises:
            ValueError: another process holds it; says which, where and since when.
        """
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(f"{self.path.parent} is in use by {self._holder()}: wait for its end.") from None
        except PermissionError as error:  # of another user, who may be using the folder
            raise ValueError(f"{self.path} cannot be opened ({error.strerror}): it belongs to another user.") from None
        except OSError as error:  # such as a network file system without locks
            self.path.unlink(missing_ok=True)
            return error.strerror or str(error)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # a full disk: the lock holds all the same
            self.path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        return ""

    def release(self) -> None:
        """Frees the lock, if it is held."""
        if self._lock.is_locked:
            with suppress(PermissionError):  # Windows removes no open file; the next one takes it as it is
                self.path.unlink(missing_ok=True)
            self._lock.release()

    def _holder(self) -> str:
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            return f"process {told['pid']} on {told['host']} since {told['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"
