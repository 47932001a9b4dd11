"""The process that episodes are forked from, and what runs in theirs; imports what environments need, once.

Over its channel come nine bytes a request: ``F`` with the number of an episode and the descriptor of its own channel
forks its process, ``K`` kills it, ``E`` does so after a while, for it has been told to leave. ``T`` asks for the tasks
that the environment brings along. When the channel closes, all processes are killed. An episode's channel carries
pickled requests of the trusted side, JSON replies of the other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from grpo_pl.processes.channel import Channel, ChannelClosed
from grpo_pl.processes.child_process import has_ended
from grpo_pl.processes.resource_limits import (
    adopt_orphans,
    child_pids,
    kill_with_parent,
    limit_memory,
    set_limit,
    stop_watching_parent,
)

REQUEST = struct.Struct(">cq")
GRACE_S = 2.0
"""Seconds that an environment may take to close."""
LONGEST_INFO = 1 << 16
"""Characters of an info as JSON; larger ones are dropped."""
OURS: list[int] = []
"""Descriptors of an episode's process that lead to the trusted side; a process that is forked from it closes them."""


def main(channel: Channel, parent: int) -> None:
    """Prepares the environment that comes first, says how that went, and forks until the channel closes."""
    settings = pickle.loads(channel.receive())
    own = sys.path if settings["keeps_path"] else ()
    sys.path[:] = dict.fromkeys([*own, *settings["path"]])
    try:
        prototype = pickle.loads(settings["prototype"])
        prototype.prepare()
    except Exception as error:  # the other side shows it to the user
        channel.send(_report(error).encode(errors="replace"))
        return
    channel.send(b"")
    gc.collect()
    gc.freeze()  # or each fork's first collection would copy all pages
    adopt_orphans()
    stop_watching_parent()  # a process with threads should not fork; `serve` looks after the parent itself
    _ForkServer(channel, prototype, settings["memory_bytes"]).serve(parent)


def _report(error: Exception) -> str:
    return f"{error}" if isinstance(error, ValueError) and f"{error}" else f"{type(error).__name__}: {error}"


class _ForkServer:
    """The forked processes by the number of their episode, and when those that are to leave are killed."""

    def __init__(self, channel: Channel, prototype: Any, memory_bytes: int) -> None:
        self.channel, self.prototype, self.memory_bytes = channel, prototype, memory_bytes
        self.pids: dict[int, int] = {}
        self.ends: dict[int, float] = {}

    def serve(self, parent: int) -> None:
        while os.getppid() == parent:
            if self.channel.poll(0.1 if self.ends else 2.0):
                try:
                    request, descriptors, *_ = socket.recv_fds(self.channel.socket, REQUEST.size, 1)
                except ConnectionError:  # the parent has not read all
                    break
                if not request:
                    break
                kind, number = REQUEST.unpack(request)
                if kind == b"F":
                    self._fork(number, descriptors[0])
                elif kind == b"T":
                    self.channel.send(self._tasks())
                elif number in self.pids:
                    self.ends[number] = time.monotonic() + (GRACE_S if kind == b"E" else 0.0)
            self._reap()
        for pid in self.pids.values():
            _kill(pid)
            os.waitpid(pid, 0)
        self.pids.clear()
        while child_pids():
            self._end_orphans()

    def _tasks(self) -> bytes:
        try:
            return json.dumps({"tasks": [dict(task) for task in self.prototype.tasks()]}).encode()
        except Exception as error:
            return json.dumps({"fault": _report(error)}).encode()

    def _fork(self, number: int, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self.channel.close()
                _play(Channel(socket.socket(fileno=descriptor)), self.prototype, self.memory_bytes)
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
            if has_ended(pid):
                _kill(pid)  # where it is not waited for yet, the group's number is still its own
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                del self.pids[number]
                self.ends.pop(number, None)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Ends what episodes that are over have left behind in groups of their own."""
        for pid in child_pids() - set(self.pids.values()):
            _kill(pid)
            os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _play(channel: Channel, prototype: Any, memory_bytes: int) -> NoReturn:
    """One episode: answers resets and steps until the channel closes."""
    from grpo_pl.environment import attempted, failed

    OURS[:] = [channel.socket.fileno()]
    os.setpgid(0, 0)
    adopt_orphans()  # what they leave behind ends with the episode
    kill_with_parent()  # nobody else could end a step that hangs once the fork server is killed
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    limit_memory(memory_bytes, beyond_now=True)  # what was imported counts for nobody
    set_limit(resource.RLIMIT_CORE, 0, for_good=True)
    environment = None
    try:
        while True:
            key, method, arguments = pickle.loads(channel.receive())
            if method == "reset":
                environment = prototype.fresh()
            assert environment is not None
            transition = attempted(getattr(environment, method), arguments, where=method, blame=prototype.blame)
            try:
                reply = json.dumps(_plain(transition) | {"key": key})
            except (TypeError, ValueError) as error:
                fault = f"{method} answered what JSON cannot say: {error}"
                reply = json.dumps(_plain(failed("malformed", fault, blame="environment")) | {"key": key})
            channel.send(reply.encode())
    except ChannelClosed:
        if environment is not None:
            environment.close()
    os._exit(0)


def _plain(transition: Any) -> dict[str, Any]:
    values = vars(transition)
    try:
        if len(json.dumps(dict(transition.info))) <= LONGEST_INFO:
            return values | {"info": dict(transition.info)}
    except (TypeError, ValueError):
        pass
    kept = {str(k): v for k, v in transition.info.items() if isinstance(v, bool | int | float | str | None)}
    return values | {"info": {k: v for k, v in kept.items() if len(str(v)) < 1000}}
