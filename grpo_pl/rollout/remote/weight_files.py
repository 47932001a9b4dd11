"""``WeightFiles``: weights in files of the one folder that a server reads, whatever others do in it meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch import Tensor

from grpo_pl.rollout.remote import wire
from grpo_pl.rollout.remote.seat import Lost

MOST_FILES = 10_000


class NoFile(ValueError):
    """A name is that of no plain file right in the folder."""


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Files that one push names. They are opened without following links, one at a time, and read as a whole: a file
    that is mapped would end the server when it is cut."""

    folder: Path
    names: Sequence[str]
    limit: int
    """Most bytes of all together."""

    def check(self) -> None:
        """Before a worker is troubled.

        Raises:
            NoFile: see there.
            Malformed: they are too large.
        """
        left = self.limit
        with self._folder() as folder:
            for name in self.names:
                with _opened(folder, name) as file:
                    left -= os.fstat(file.fileno()).st_size
        self._check_left(left)

    def read(self, is_over: Callable[[], bool]) -> Iterator[tuple[str, Tensor]]:
        """The tensors.

        Raises:
            Lost: ``is_over`` turned true.
            NoFile, Malformed: a file is gone, was replaced, or holds no weights.
        """
        left = self.limit
        with self._folder() as folder:
            for name in self.names:
                with _opened(folder, name) as file:
                    # one byte more, which shows a file that has grown too large
                    data = file.read(min(left, os.fstat(file.fileno()).st_size) + 1)
                left -= len(data)
                self._check_left(left)
                tensors = wire.unpacked(data)
                del data
                while tensors:
                    if is_over():
                        raise Lost("the push broke off.")
                    first = next(iter(tensors))
                    yield first, tensors.pop(first)

    def _check_left(self, left: int) -> None:
        if left < 0:
            raise wire.Malformed(f"the files are larger than {self.limit / 2**30:g} GiB together (--max-weights-gib).")

    @contextmanager
    def _folder(self) -> Iterator[int]:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def _opened(folder: int, name: str) -> Iterator[IO[bytes]]:
    try:
        if Path(name).name != name:
            raise ValueError(name)
        # without waiting, as for the writer of a pipe
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = open(os.open(name, flags, dir_fd=folder), "rb")  # noqa: SIM115 - closed below
    except (OSError, ValueError):
        raise NoFile(f"there is no file {name!r} in the server's folder.") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NoFile(f"there is no file {name!r} in the server's folder.")
        yield file
