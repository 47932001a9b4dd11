"""Messages between two processes over a socket: bytes with their length in front."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator

_LENGTH = struct.Struct("!Q")
_READ = 1 << 20


class MessageTooLong(ValueError):
    """The other side announces a message that is longer than allowed."""


def framed(message: bytes | memoryview) -> bytes:
    """The message with its length in front."""
    return _LENGTH.pack(len(message)) + message


class MessageReader:
    """Splits a stream of bytes into messages.

    Args:
        longest: most bytes of a message; None sets no limit.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._bytes, self._longest = bytearray(), longest

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds received bytes and yields the messages that are complete.

        Raises:
            MessageTooLong: a message exceeds ``longest``; nothing more can be read.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes)
            if self._longest is not None and size > self._longest:
                raise MessageTooLong(f"{size} bytes")
            end = _LENGTH.size + size
            if len(self._bytes) < end:
                return
            message = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            yield message


class Channel:
    """One end of a connected socket; one thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        os.set_inheritable(end.fileno(), False)  # programs that this process starts do not keep it open

    def send(self, message: bytes) -> None:
        """Sends a message; waits while the other side does not read.

        Raises:
            OSError: the other side is closed.
        """
        self.socket.sendall(framed(message))

    def receive(self, within_s: float | None = None) -> bytes:
        """The next message.

        Raises:
            TimeoutError: it is not complete after ``within_s`` seconds; the channel cannot be read any more.
            EOFError, OSError: the other side is closed.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        return self._exactly(size, deadline)

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        parts = []
        while count:
            if deadline is not None and not self.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("no complete message in time")
            part = self.socket.recv(min(count, _READ))  # not all at once: the length is the other side's word
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """True once something can be read or the other side is closed; waits so many seconds for it."""
        poll = select.poll()  # select() fails on descriptors from 1024 on
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def close(self) -> None:
        self.socket.close()
