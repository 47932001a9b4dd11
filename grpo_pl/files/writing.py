"""Writing files that a full disk may meet: whole or not at all, with one kind of error, and without ending a run."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_failing: set[Path] = set()
"""Files that could not be written when it was tried last."""


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets ``write`` fill a neighbour of ``path``, forces it to disk and renames it; a failure leaves no trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".partial")
    try:
        write(staging)
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def append_lines(path: Path, text: str) -> None:
    """Adds all of ``text`` to the end of ``path``, or nothing.

    Raises:
        OSError: it could not be written; the file is as it was.
    """
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
    except OSError:
        if path.exists():
            os.truncate(path, before)
        raise


@contextmanager
def dispensable(path: Path) -> Iterator[None]:
    """Around writing a file that a run can go on without: an ``OSError``, such as a full disk, becomes a warning, once
    until it can be written again."""
    try:
        yield
    except OSError as error:
        if path not in _failing:
            _failing.add(path)
            reason = error.strerror or str(error)
            warnings.warn(f"{path} cannot be written: {reason}. The run goes on; it is tried again.", stacklevel=3)
    else:
        _failing.discard(path)


class PatientFile(io.BufferedWriter):
    """A file for writers that lose the reason of a failed write, as ``torch.save`` does: such a writer goes on to its
    end, and ``close`` raises the first ``OSError``."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        self._attempt(lambda: super(PatientFile, self).write(data))
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._attempt(super().flush)

    def close(self) -> None:
        self._attempt(super().close)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _attempt(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            self._error = self._error or error


@contextmanager
def system_errors() -> Iterator[None]:
    """Around libraries written in Rust (safetensors, tokenizers), which put the number of a system error into the text
    of an exception of their own: raises the ``OSError`` of that number instead."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
