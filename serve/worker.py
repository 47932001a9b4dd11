"""What the front process and its workers say to each other over a socket, and how a worker ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!Q")
_READ = 1 << 18


class Refusal(NamedTuple):
    """What a worker answers to a request that the client has to mend."""

    message: str
    param: str | None = "items"
    code: str = "missing_column"


class Cancel(NamedTuple):
    """Nobody waits any more: for a whole request, or for its completions of these indices."""

    indices: frozenset[int] | None = None


class Answer(NamedTuple):
    """The whole answer to a request."""

    uid: int
    data: Any


class Failure(NamedTuple):
    """Why a request gets no answer, or no more of it."""

    uid: int
    reason: str | Refusal


def packed(message: Any) -> bytes:
    """A message as :class:`Frames` reads it."""
    data = ForkingPickler.dumps(message)  # as multiprocessing's own pipes do: both ends are processes of this server
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Takes what has come and yields the messages that are whole."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            with memoryview(self._bytes) as view:
                message = ForkingPickler.loads(view[_LENGTH.size : end])
            del self._bytes[:end]
            yield message


class Mailbox:
    """Requests in, answers out. Sending waits while the front process is far behind."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._frames, self._sending = end, Frames(), threading.Lock()

    def take(self, *, wait_for_one: bool) -> list[tuple[int, Any]]:
        """The (uid, payload) that have come; ``wait_for_one`` waits until something has.

        Raises:
            SystemExit: the front process has closed the line, or is gone.
        """
        try:
            data = self._end.recv(_READ, 0 if wait_for_one else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""  # a front process that was killed may reset the line
        if not data:
            raise SystemExit(0)
        return list(self._frames.feed(data))

    def send(self, message: Any) -> None:
        try:
            with self._sending:
                self._end.sendall(packed(message))
        except OSError:
            raise SystemExit(0) from None


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that ended, and not by signals.

    SIGTERM, Ctrl-C and the end of a terminal reach the whole process group: the parent, which knows what is in flight,
    decides. Processes that this one starts inherit that.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
