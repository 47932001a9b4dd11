"""Episodes in processes of their own, forked from one that has imported what they need; none outlives its limit."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import secrets
import select
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from grpo_pl.environment import (
    Blame,
    Environment,
    EnvironmentMistake,
    PoolLimits,
    Status,
    Transition,
    failed,
    read_step,
)
from grpo_pl.extras.agents.fork_server import LONGEST_INFO, REQUEST
from grpo_pl.extras.agents.limits import at_fault, over_time
from grpo_pl.processes.channel import ChannelClosed, MessageReader, MessageTooLong, framed
from grpo_pl.processes.child_process import ChildProcess, ChildStartError
from grpo_pl.processes.variables import clean_environment

FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Orders of sets are part of what episodes show; and hundreds of processes share the machine."""
_LISTING_S = 600.0
_OF_AN_INTERPRETER = frozenset({"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"})
"""Variables that lead an interpreter to the libraries of another."""


@dataclass
class _EpisodeProcess:
    """The channel to an episode's process, and what is under way on it."""

    number: int
    """The fork server's number of the process; never given twice."""
    socket: socket.socket
    method: str = ""
    key: str = ""
    """Of what is under way; its reply repeats it. What runs there cannot know it before, so no reply is one to a later
    request."""
    deadline: float = 0.0
    outgoing: bytes = b""
    incoming: MessageReader = field(default_factory=MessageReader)


class Processes:
    """Runs resets and steps of many episodes at once; used by one thread."""

    def __init__(self, prototype: Environment, limits: PoolLimits) -> None:
        self.prototype, self.limits = prototype, limits
        self.episodes: dict[int, _EpisodeProcess] = {}
        self._fork_server: ChildProcess | None = None
        self._failed: list[tuple[int, Transition]] = []
        self._numbers = itertools.count()
        # JSON writes 12 characters for some
        self._longest_reply = 12 * limits.max_observation_chars + 4 * LONGEST_INFO

    def start(self) -> None:
        """Starts the process that episodes are forked from.

        Raises:
            ValueError: the environment cannot be handed over, or refuses its settings.
        """
        name = type(self.prototype).__name__
        try:
            if type(self.prototype).__module__ == "__main__":
                raise ValueError("it stands in the script that runs")
            prototype = pickle.dumps(self.prototype)
        except Exception as error:  # a user's class may refuse in any way
            raise ValueError(
                f"environment {name} cannot be sent to a process of its own ({error}): put it and its functions at the "
                "top of a module, or set isolation to 'thread'."
            ) from error
        interpreter, passed = self.prototype.interpreter, frozenset(self.prototype.passed)
        if missing := sorted(passed - os.environ.keys()):
            raise ValueError(f"passed: the environment of the training has no variable {', '.join(missing)}.")
        variables, path = clean_environment(passed) | FIXED, [str(folder) for folder in sys.path]
        if interpreter:  # which has its own libraries
            variables = {name: value for name, value in variables.items() if name not in _OF_AN_INTERPRETER - passed}
            path = [folder for folder in path if not _is_of_this_interpreter(Path(folder))]
        try:
            self._fork_server = ChildProcess(
                "grpo_pl.extras.agents.fork_server:main",
                environment=variables,
                python=interpreter,
                patience_s=10.0,  # to end the processes of episodes, with all that these have started
            )
        except OSError as error:
            raise ValueError(
                f"the process for {name} cannot be started with {interpreter or sys.executable}: {error}."
            ) from error
        settings = {
            "path": path,
            "keeps_path": bool(self.prototype.interpreter),
            "prototype": prototype,
            "memory_bytes": self.limits.memory_limit_mb * 2**20,
        }
        try:
            fault = self._fork_server.start(pickle.dumps(settings))
        except ChildStartError as error:
            self._drop_fork_server()
            raise ValueError(f"the process for {name} {error}.") from error
        if fault:
            self._drop_fork_server()
            raise ValueError(fault)

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks that the environment brings along.

        Raises:
            ValueError: it cannot list them, or its process has ended over it.
        """
        assert self._fork_server is not None
        name = type(self.prototype).__name__
        try:
            if not self._request(b"T", 0):
                raise ChannelClosed
            answer = json.loads(self._fork_server.channel.receive(_LISTING_S))
        except ChannelClosed:
            raise ValueError(f"the process for {name} ended while it listed tasks.") from None
        except TimeoutError:
            self._drop_fork_server()
            raise ValueError(f"{name} has not listed its tasks in {_LISTING_S:g} s.") from None
        if "fault" in answer:
            raise ValueError(answer["fault"])
        return list(answer["tasks"])

    def submit(self, episode: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            process = self.episodes.get(episode) or self._start_episode(episode)
        except (OSError, ValueError) as error:
            self._failed.append((episode, failed("unavailable", f"no process: {error}", blame="environment")))
            return
        process.method, process.key = method, secrets.token_hex(8)
        process.deadline = time.monotonic() + self.limits.of(method)
        process.incoming = MessageReader(self._longest_reply)  # without what came after the last reply
        process.outgoing = framed(pickle.dumps((process.key, method, arguments)))

    def poll(self, timeout_s: float) -> list[tuple[int, Transition]]:
        """Transitions that are complete by now, or within ``timeout_s``."""
        ended, self._failed = self._failed, []
        waiting = {process.socket.fileno(): episode for episode, process in self.episodes.items() if process.method}
        poller = select.poll()  # select() fails on descriptors from 1024 on
        for descriptor, episode in waiting.items():
            poller.register(descriptor, select.POLLIN | (select.POLLOUT if self.episodes[episode].outgoing else 0))
        left = min((self.episodes[e].deadline for e in waiting.values()), default=0.0) - time.monotonic()
        for descriptor, _ in poller.poll(1000 * max(0.0, 0.0 if ended else min(timeout_s, left))):
            episode = waiting[descriptor]
            transition = self._advance(self.episodes[episode])
            if transition is not None:
                self.episodes[episode].method = ""
                ended.append((episode, transition))
        for episode in waiting.values():
            process = self.episodes[episode]
            if process.method and time.monotonic() >= process.deadline:
                ended.append((episode, over_time(self.prototype, process.method, self.limits)))
                process.method = ""
        for episode, transition in ended:
            if transition.status in ("timeout", "killed", "too_long"):
                self.discard(episode, kill=True)
        return ended

    def discard(self, episode: int, *, kill: bool = False) -> None:
        """Ends an episode's process: closes its channel, on which it closes its environment, unless it is killed."""
        process = self.episodes.pop(episode, None)
        if process is not None:
            process.socket.close()
            self._request(b"K" if kill else b"E", process.number)

    def close(self) -> None:
        """Ends all processes and waits for that."""
        self._failed.clear()
        for episode in list(self.episodes):
            self.discard(episode, kill=True)
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _start_episode(self, episode: int) -> _EpisodeProcess:
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        try:
            with theirs:
                if not self._request(b"F", number, theirs):  # the fork server was killed: its successor
                    self._drop_fork_server()
                    self.start()
                    if not self._request(b"F", number, theirs):
                        raise OSError("the process that episodes are forked from has ended.")
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self.episodes[episode] = _EpisodeProcess(number, ours)
        return self.episodes[episode]

    def _drop_fork_server(self) -> None:
        """Leaves a fork server that has ended or never began; the processes of its episodes end with it."""
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.close()
            self._fork_server = None

    def _request(self, kind: bytes, number: int, channel: socket.socket | None = None) -> bool:
        if self._fork_server is None:
            return False
        descriptors = [] if channel is None else [channel.fileno()]
        try:
            socket.send_fds(self._fork_server.channel.socket, [REQUEST.pack(kind, number)], descriptors)
        except ConnectionError:
            return False
        return True

    def _advance(self, process: _EpisodeProcess) -> Transition | None:
        """Writes and reads what can be without waiting; the transition once it is complete."""
        method = process.method
        try:
            if process.outgoing:
                process.outgoing = process.outgoing[process.socket.send(process.outgoing) :]
            part = process.socket.recv(1 << 16)
            if part:
                reply = next(process.incoming.feed(part), None)
                return None if reply is None else _restored(reply, process.key)
        except BlockingIOError:
            return None
        except MessageTooLong as error:
            return at_fault(self.prototype, method, "too_long", f"{method} answered {error}")
        except ConnectionError:
            pass
        return at_fault(self.prototype, method, "killed", f"its process ended during {method}")


def _is_of_this_interpreter(folder: Path) -> bool:
    """True for its standard library and the packages installed for it, not for a project that has them inside."""
    standard = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return not {"site-packages", "dist-packages"}.isdisjoint(folder.parts) or any(
        folder == each or folder in (each / "lib-dynload", each.parent / f"{each.name.replace('.', '')}.zip")
        for each in standard
    )


def _restored(body: bytes, key: str) -> Transition:
    """A reply read with the same care as if it came from the environment: whatever runs there may have written it."""
    try:
        values = json.loads(body)
        if values["key"] != key:
            raise ValueError("it was there before the request")
        if values["status"] != "ok":
            if values["status"] not in get_args(Status) or values["blame"] not in get_args(Blame):
                raise ValueError(f"status {values['status']!r}, blame {values['blame']!r}")
            return failed(values["status"], str(values["detail"]), blame=values["blame"])
        info = values["info"] | {"state": values["state"], "invalid_action": values["invalid_action"]}
        return read_step((values["observation"], values["reward"], values["terminated"], values["truncated"], info))
    except EnvironmentMistake as mistake:
        return failed("malformed", str(mistake), blame="environment")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return failed("malformed", f"the environment's process wrote no transition ({error!r})", blame="environment")
