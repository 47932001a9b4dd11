"""What the child processes of ``tests/processes`` run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import grpo_pl
from grpo_pl.processes.channel import Channel


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


def sleep_with_a_program(channel: Channel, parent: int) -> None:
    program = subprocess.Popen(["sleep", "300"])
    channel.send(str(program.pid).encode())
    time.sleep(300)


def die_with_a_program(channel: Channel, parent: int) -> None:
    program = subprocess.Popen(["sleep", "300"])
    channel.send(str(program.pid).encode())
    os._exit(3)


def refuse(channel: Channel, parent: int) -> None:
    channel.send(channel.receive())


def deaf(channel: Channel, parent: int) -> None:
    time.sleep(300)


def endless(channel: Channel, parent: int) -> None:
    channel.socket.sendall((2**62).to_bytes(8, "big"))
    while True:
        channel.socket.sendall(bytes(1 << 20))


def fail_on_a_file(channel: Channel, parent: int) -> None:
    raise EOFError("the file is cut off")


def write_at_the_end(channel: Channel, parent: int, file: str) -> None:
    channel.send(b"")
    try:
        channel.receive()
    finally:
        time.sleep(0.5)  # longer than a kill takes
        Path(file).write_text("")


def print_and_die(channel: Channel, parent: int, number: str) -> None:
    for i in range(20):
        print(f"line {i}", flush=True)
    os.kill(os.getpid(), int(number))
