"""What the child processes of ``tests/processes`` run."""

import os
import sys
import time
from pathlib import Path

import grpo_pl
from grpo_pl.processes.channel import Channel
from grpo_pl.processes.resource_limits import end_with_parent


def echo(channel: Channel, parent: int, *arguments: str) -> None:
    channel.send(" ".join((str(parent), *arguments)).encode())
    while True:
        channel.send(channel.receive())


def variables(channel: Channel, parent: int) -> None:
    channel.send(" ".join(os.environ).encode())


def path(channel: Channel, parent: int) -> None:
    channel.send("\n".join([grpo_pl.__file__, *sys.path]).encode())


def sleep(channel: Channel, parent: int) -> None:
    channel.send(b"")
    time.sleep(300)


def watch(channel: Channel, parent: int) -> None:
    end_with_parent(parent)
    sleep(channel, parent)


def write_at_the_end(channel: Channel, parent: int, file: str) -> None:
    channel.send(b"")
    try:
        channel.receive()
    finally:
        Path(file).write_text("")


def print_and_die(channel: Channel, parent: int, number: str) -> None:
    for i in range(20):
        print(f"line {i}", flush=True)
    os.kill(os.getpid(), int(number))
