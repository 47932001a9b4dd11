"""Messages between two processes over a socket: bytes with their length in front."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

_LENGTH = struct.Struct("!Q")
_READ = 1 << 20


class MessageTooLong(ValueError):
    """The other side announces a message that is longer than allowed."""


class ChannelClosed(EOFError):
    """The other side has closed the channel, or has ended."""


def framed(message: bytes | memoryview) -> bytes:
    """The message with its length in front."""
    return _LENGTH.pack(len(message)) + message


class MessageReader:
    """Splits a stream of bytes into messages.

    Args:
        longest: most bytes of a message; None sets no limit.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.longest = longest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Adds received bytes and yields the messages that are complete.

        Raises:
            MessageTooLong: a message exceeds ``longest``; nothing more can be read.
        """
        self._bytes += data
        while self.missing <= 0:
            end = len(self._bytes) + self.missing
            message = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            yield message

    @property
    def missing(self) -> int:
        """Bytes until the length of the first message is there, or else all of it; negative by what comes after it.

        Raises:
            MessageTooLong: it exceeds ``longest``.
        """
        if len(self._bytes) < _LENGTH.size:
            return _LENGTH.size - len(self._bytes)
        (size,) = _LENGTH.unpack_from(self._bytes)
        if self.longest is not None and size > self.longest:
            raise MessageTooLong(f"{size} bytes")
        return _LENGTH.size + size - len(self._bytes)


class Channel:
    """One end of a connected socket; one thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        os.set_inheritable(end.fileno(), False)  # programs that this process starts do not keep it open
        self._reader = MessageReader()

    def send(self, message: bytes, within_s: float | None = None) -> None:
        """Sends a message; waits while the other side does not read.

        Raises:
            TimeoutError: it does not read all of it within so many seconds; nothing more can be sent.
            ChannelClosed: the other side is closed.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        rest = memoryview(framed(message))
        try:
            while rest:
                self._wait_for(select.POLLOUT, deadline)
                with suppress(BlockingIOError):
                    rest = rest[self.socket.send(rest, 0 if deadline is None else socket.MSG_DONTWAIT) :]
        except ConnectionError as error:
            raise ChannelClosed from error

    def receive(self, within_s: float | None = None, *, longest: int | None = None) -> bytes:
        """The next message.

        Args:
            longest: most bytes that it may have; None sets no limit.

        Raises:
            TimeoutError: it is not complete after ``within_s`` seconds.
            MessageTooLong: it is longer; nothing more can be read.
            ChannelClosed: the other side is closed.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        self._reader.longest = longest
        while True:
            # no byte of what comes after this message, and not all at once: the length is the other side's word
            count = min(self._reader.missing, _READ)
            try:
                self._wait_for(select.POLLIN, deadline)
                part = self.socket.recv(count)
            except ConnectionError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            for message in self._reader.feed(part):
                return message

    def ask(self, message: bytes, within_s: float, *, longest: int | None = None) -> bytes:
        """Sends a message and returns the one that comes back, all within so many seconds; raises what these do."""
        deadline = time.monotonic() + within_s
        self.send(message, within_s)
        return self.receive(deadline - time.monotonic(), longest=longest)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """True once something can be read or the other side is closed; waits so many seconds for it."""
        try:
            self._wait_for(select.POLLIN, time.monotonic() + timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def _wait_for(self, event: int, deadline: float | None) -> None:
        """Returns once the socket can be read or written to, or at once without a deadline, for then the call waits."""
        if deadline is None:
            return
        if self.socket.fileno() < 0:
            raise ChannelClosed
        poll = select.poll()  # select() fails on descriptors from 1024 on
        poll.register(self.socket, event)
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the other side did not read or write in time")
