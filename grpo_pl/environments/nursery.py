"""The process that episodes are forked from, and what runs in theirs; imports what environments need, once.

Over a Unix socket come nine bytes a request: ``F`` with the number of an episode and the descriptor of its channel
forks its process, ``K`` kills it, ``E`` does so after a while, for it has been told to leave. When the socket closes,
all processes are killed. A channel carries messages with their length in front: pickled requests of the trusted side,
JSON replies of the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

GRACE_S = 2.0
"""How long an environment may take to close."""
LONGEST_INFO = 1 << 16
"""Characters of an info as JSON; larger ones are dropped."""


def pack(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def receive(channel: socket.socket) -> bytes:
    """The next message; raises ``EOFError`` when the other side has gone."""
    (size,) = struct.unpack(">I", _exactly(channel, 4))
    return _exactly(channel, size)


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main(descriptor: int) -> None:
    """Prepares the pattern that comes first, says how that went, and forks until the socket closes."""
    control = socket.socket(fileno=descriptor)
    try:
        settings = pickle.loads(receive(control))
        pattern = pickle.loads(settings["pattern"])
        pattern.prepare()
    except EOFError:
        return
    except Exception as error:  # the other side shows it to the user
        report = {"error": f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
        control.sendall(pack(json.dumps(report).encode()))
        return
    control.sendall(pack(b"{}"))
    _Nursery(control, pattern, settings["memory_bytes"]).serve()


class _Nursery:
    """The forked processes by the number of their episode, and when those that are to leave are killed."""

    def __init__(self, control: socket.socket, pattern: Any, memory_bytes: int) -> None:
        self.control, self.pattern, self.memory_bytes = control, pattern, memory_bytes
        self.pids: dict[int, int] = {}
        self.ends: dict[int, float] = {}

    def serve(self) -> None:
        while True:
            if select.select([self.control], [], [], 0.1 if self.ends else 2.0)[0]:
                record, descriptors, *_ = socket.recv_fds(self.control, 9, 1)
                if not record:
                    break
                kind, number = struct.unpack(">cq", record)
                if kind == b"F":
                    self._fork(number, descriptors[0])
                elif number in self.pids:
                    self.ends[number] = time.monotonic() + (GRACE_S if kind == b"E" else 0.0)
            self._reap()
        for pid in self.pids.values():
            _kill(pid)
            os.waitpid(pid, 0)

    def _fork(self, number: int, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self.control.close()
                live(socket.socket(fileno=descriptor), self.pattern, self.memory_bytes)
            finally:
                os._exit(0)
        with contextlib.suppress(OSError):  # done by the child as well: whoever comes first
            os.setpgid(pid, pid)
        os.close(descriptor)
        self.pids[number] = pid

    def _reap(self) -> None:
        """Kills what is overdue, and takes leave of what has ended, with all that it had started."""
        for number, end in list(self.ends.items()):
            if time.monotonic() >= end and number in self.pids:
                _kill(self.pids[number])
        for number, pid in list(self.pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill(pid)  # not waited for, so the group's number is still its own
                os.waitpid(pid, 0)
                del self.pids[number]
                self.ends.pop(number, None)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def live(channel: socket.socket, pattern: Any, memory_bytes: int) -> NoReturn:
    """One episode: answers resets and steps until the channel closes."""
    from grpo_pl.environments.base import attempted, failed

    os.setpgid(0, 0)
    _die_with_the_nursery()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = _address_space() + memory_bytes
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = None
    try:
        while True:
            method, arguments = pickle.loads(receive(channel))
            if method == "reset":
                environment = pattern.fresh()
            assert environment is not None
            transition = attempted(getattr(environment, method), arguments, where=method, blame=pattern.blame)
            try:
                reply = json.dumps(_plain(transition))
            except (TypeError, ValueError) as error:
                fault = f"{method} answered what JSON cannot say: {error}"
                reply = json.dumps(_plain(failed("malformed", fault, blame="environment")))
            channel.sendall(pack(reply.encode()))
    except (EOFError, ConnectionError):
        if environment is not None:
            environment.close()
    os._exit(0)


def _address_space() -> int:
    """Bytes in use; what the nursery has imported counts for nobody. 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _plain(transition: Any) -> dict[str, Any]:
    values = vars(transition) | {"observation": transition.observation}
    try:
        if len(json.dumps(dict(transition.info))) <= LONGEST_INFO:
            return values | {"info": dict(transition.info)}
    except (TypeError, ValueError):
        pass
    kept = {str(k): v for k, v in transition.info.items() if isinstance(v, bool | int | float | str | None)}
    return values | {"info": {k: v for k, v in kept.items() if len(str(v)) < 1000}}


def _die_with_the_nursery() -> None:
    """A step that hangs would outlive a nursery that is killed itself, for nobody else could end it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
