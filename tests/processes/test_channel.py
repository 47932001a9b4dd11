"""Messages arrive whole and in order, however the bytes come, and no length is believed."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from grpo_pl.processes.channel import Channel, ChannelClosed, MessageReader, MessageTooLong, framed

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_a_reader_splits_bytes_into_messages_wherever_they_are_cut() -> None:
    messages = [b"", b"a", b"bc" * 1000, b"d"]
    stream = b"".join(map(framed, messages))
    for step in (1, 7, 8, 9, 1000, len(stream)):
        reader, found = MessageReader(), []
        for begin in range(0, len(stream), step):
            found += reader.feed(stream[begin : begin + step])
        assert found == messages


def test_a_channel_gives_whole_messages_and_notices_the_end(ends: Ends) -> None:
    channel, other = ends
    other.sendall(framed(b"one") + framed(b"") + framed(b"three")[:9])
    assert [channel.receive(), channel.receive()] == [b"one", b""]
    other.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send(b"nobody reads it")


def test_a_message_that_is_not_complete_in_time_is_given_up(ends: Ends) -> None:
    channel, other = ends
    assert not channel.poll()
    other.sendall(framed(b"never complete")[:-1])
    assert channel.poll()
    with pytest.raises(TimeoutError):
        channel.receive(within_s=0.05)


def test_a_length_alone_takes_no_memory(ends: Ends) -> None:
    channel, other = ends
    other.sendall(struct.pack("!Q", 2**62))
    other.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_a_message_that_is_longer_than_allowed_is_not_read(ends: Ends) -> None:
    channel, other = ends
    other.sendall(framed(b"x" * 10) + framed(b"y" * 11))
    assert channel.receive(longest=10) == b"x" * 10
    with pytest.raises(MessageTooLong, match="11 bytes"):
        channel.receive(longest=10)


def test_a_message_is_read_without_what_comes_after_it(ends: Ends) -> None:
    """The fork server reads requests with descriptors from the same socket, and `poll` looks there."""
    channel, other = ends
    other.sendall(framed(b"one") + b"rest")
    assert channel.receive() == b"one" and channel.socket.recv(100) == b"rest"


def test_a_message_that_nobody_reads_is_given_up_in_time(ends: Ends) -> None:
    channel, _ = ends
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.send(bytes(1 << 24), within_s=0.2)
    assert 0.2 <= time.monotonic() - began < 20.0


def test_a_question_and_its_answer_share_their_time(ends: Ends) -> None:
    channel, other = ends
    there = Channel(other)
    thread = threading.Thread(target=lambda: there.send(there.receive()[::-1]))
    thread.start()
    assert channel.ask(b"ab" * 10**6, within_s=60.0) == b"ba" * 10**6
    thread.join()
    with pytest.raises(TimeoutError):
        channel.ask(b"ab", within_s=0.1)


def test_programs_that_are_started_do_not_inherit_a_channel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.set_inheritable(True)
        assert not Channel(ours).socket.get_inheritable()
