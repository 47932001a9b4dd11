"""Atomic writing on a disk that may be full; files that a run can do without only warn."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_failing: set[Path] = set()
"""Files whose last write failed."""


@contextmanager
def staged(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A neighbour of ``path`` to write to, which is forced to disk and takes the place of ``path`` at the end of the
    block; an error in the block leaves ``path`` as it was.

    Args:
        path: the file to be; its folder is made where it is missing.
        shared: other processes may write it at the same time; the neighbour of one that is killed then stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f"{path.name}.{os.getpid()}.partial" if shared else f"{path.name}.partial")
    try:
        yield staging
        _force_to_disk(staging)
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


@contextmanager
def staged_folder(folder: Path, *, replace: bool = True) -> Iterator[Path]:
    """`staged` for a folder, which other processes may write at the same time.

    Args:
        folder: the folder to be.
        replace: take the place of an earlier one; false leaves one that another process has written meanwhile.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    before = staging.with_name(f"{staging.name}-before")
    try:
        staging.chmod(0o755)  # a temporary folder is private
        yield staging
        (usual := staging / ".usual").touch()
        mode = usual.stat().st_mode
        usual.unlink()
        for file in filter(Path.is_file, staging.rglob("*")):
            file.chmod(mode)  # safetensors writes files that nobody else may read
            _force_to_disk(file)
        if replace:
            with suppress(FileNotFoundError):
                os.replace(folder, before)
        try:
            os.replace(staging, folder)
        except OSError:
            if before.exists():
                os.replace(before, folder)
            if replace or not folder.is_dir():
                raise
    finally:
        for leftover in (staging, before):
            shutil.rmtree(leftover, ignore_errors=True)


def _force_to_disk(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def link_atomically(link: Path, target: str) -> None:
    """Makes ``link`` a symbolic link to ``target`` in one step, whatever it was before."""
    staging = link.with_name(f"{link.name}.partial")
    staging.unlink(missing_ok=True)
    staging.symlink_to(target)
    os.replace(staging, link)


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
def best_effort(path: Path) -> Iterator[None]:
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


class DeferredErrorFile(io.BufferedWriter):
    """A file for writers that lose the reason of a failed write, as ``torch.save`` does: such a writer goes on to its
    end, and ``close`` raises the first ``OSError``."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        self._attempt(lambda: super(DeferredErrorFile, self).write(data))
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
