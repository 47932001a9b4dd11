"""Messages between the front process and its workers over a socket, and how a worker ends."""

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
    """A worker's reason for not serving a request that is the client's fault."""

    message: str
    param: str | None = "items"
    code: str = "missing_column"


class Cancel(NamedTuple):
    """Message that a request is cancelled, or only its completions with these indices."""

    indices: frozenset[int] | None = None


class Answer(NamedTuple):
    """The complete answer to a request."""

    uid: int
    data: Any


class Failure(NamedTuple):
    """The end of a request that failed, with the reason."""

    uid: int
    reason: str | Refusal


def packed(message: Any) -> bytes:
    """A message in the form that :class:`Frames` reads: its length in 8 bytes, then its pickle."""
    data = ForkingPickler.dumps(message)  # as in multiprocessing's own pipes: both ends are processes of this server
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Adds received bytes and yields the messages that are complete."""
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
    """A worker's side of the connection. Sending blocks while the front process does not read."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._frames, self._sending = end, Frames(), threading.Lock()

    def take(self, *, wait_for_one: bool) -> list[tuple[int, Any]]:
        """The (uid, payload) pairs that have arrived; ``wait_for_one`` waits until data arrives.

        Raises:
            SystemExit: the front process has closed the connection, or has ended.
        """
        try:
            data = self._end.recv(_READ, 0 if wait_for_one else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""  # if the front process was killed, the connection may be reset
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
    """Makes this process ignore SIGTERM, SIGINT and SIGHUP and end when its parent ends, in whatever way.

    Signals of Ctrl-C or of a closed terminal reach the whole process group, but the parent, which knows the requests in
    flight, decides when a worker ends. Processes that this one starts ignore these signals, too.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
