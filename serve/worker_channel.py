"""Messages between the front process and its workers over a socket, and how a worker ends."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from grpo_pl.processes import resource_limits
from grpo_pl.processes.channel import MessageReader, framed

_READ = 1 << 18


class InvalidRequest(NamedTuple):
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
    reason: str | InvalidRequest


def packed(message: Any) -> bytes:
    """A message in the form that :class:`Frames` reads: pickled, for both ends are processes of this server."""
    return framed(ForkingPickler.dumps(message))


class Frames:
    """Splits a stream of bytes into messages that `packed` wrote."""

    def __init__(self) -> None:
        self._reader = MessageReader()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Adds received bytes and yields the messages that are complete."""
        yield from map(ForkingPickler.loads, self._reader.feed(data))


class FrontChannel:
    """A worker's connection to the front process. Sending blocks while the front process does not read."""

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


class WorkerTask(ABC):
    """The work of one worker: in a process of this server's, or in a thread of a worker of somebody's ``LitServer``."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The environment variables of a process of its own."""

    @abstractmethod
    def prepare(self) -> None:
        """Sets up the work. What its user can put right is a ``ValueError``, ``OSError``, ``ImportError`` or
        ``CheckpointError``, of which the front process tells in one line."""

    @abstractmethod
    def work(self, front: FrontChannel) -> None:
        """Answers requests; never returns.

        Raises:
            SystemExit: the front process has ended or closed the connection.
        """


def end_with_parent() -> None:
    """Makes this process ignore SIGTERM, SIGINT and SIGHUP and end when its parent ends, in whatever way.

    Signals of Ctrl-C or of a closed terminal reach the whole process group, but the parent, which knows the requests in
    flight, decides when a worker ends. Processes that this one starts ignore these signals, too.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    resource_limits.end_with_parent(parent.pid)
