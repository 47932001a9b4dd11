"""Episodes in processes of their own, forked from one that has imported what they need; none outlives its limit."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, get_args

from grpo_pl.environments import nursery
from grpo_pl.environments.base import Blame, Environment, EnvironmentMistake, Status, Transition, failed, read_step
from grpo_pl.environments.limits import PoolLimits, at_fault, over_time
from grpo_pl.environments.nursery import LONGEST_INFO, pack, receive
from grpo_pl.processes.environment import clean_environment

START_LIMIT_S = 180.0
"""An environment that has not been imported by then will not be."""

FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Orders of sets are part of what episodes show; and hundreds of processes share the machine."""


@dataclass
class _Seat:
    """The channel to an episode's process, and what is under way on it."""

    number: int
    """What the nursery knows the process by; never given twice."""
    channel: socket.socket
    method: str = ""
    deadline: float = 0.0
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)


class Processes:
    """Runs resets and steps of many episodes at once; used by one thread."""

    def __init__(self, pattern: Environment, limits: PoolLimits) -> None:
        self.pattern, self.limits = pattern, limits
        self.seats: dict[int, _Seat] = {}
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._failed: list[tuple[int, Transition]] = []
        self._numbers = itertools.count()

    def start(self) -> None:
        """Starts the process that episodes are forked from.

        Raises:
            ValueError: the environment cannot be handed over, or refuses its settings.
        """
        try:
            if type(self.pattern).__module__ == "__main__":
                raise ValueError("it stands in the script that runs")
            pattern = pickle.dumps(self.pattern)
        except Exception as error:  # a user's class may refuse in any way
            raise ValueError(
                f"environment {type(self.pattern).__name__} cannot be sent to a process of its own ({error}): put it "
                "and its functions at the top of a module, or set isolation to 'thread'."
            ) from error
        self._control, theirs = socket.socketpair()
        folders = [str(folder) for folder in sys.path]
        code = f"import sys; sys.path[:] = {folders!r}; from {nursery.__name__} import main; main({theirs.fileno()})"
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, whose end ends those
                env=clean_environment() | FIXED,
            )
        settings = {"pattern": pattern, "memory_bytes": self.limits.memory_limit_mb * 2**20}
        self._control.settimeout(START_LIMIT_S)
        try:
            self._control.sendall(pack(pickle.dumps(settings)))
            report = json.loads(receive(self._control))
        except (EOFError, OSError) as error:
            self._leave_nursery()
            raise ValueError(f"the process for {type(self.pattern).__name__} did not start: {error!r}.") from error
        self._control.settimeout(None)
        if "error" in report:
            self._leave_nursery()
            raise ValueError(report["error"])

    def submit(self, episode: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            seat = self.seats[episode] if episode in self.seats else self._seat(episode)
        except (OSError, ValueError) as error:
            self._failed.append((episode, failed("unavailable", f"no process: {error}", blame="environment")))
            return
        seat.method, seat.deadline = method, time.monotonic() + self.limits.of(method)
        seat.outgoing = pack(pickle.dumps((method, arguments)))

    def poll(self, timeout_s: float) -> list[tuple[int, Transition]]:
        """What has ended by now, or within ``timeout_s``."""
        ended, self._failed = self._failed, []
        waiting = {seat.channel.fileno(): episode for episode, seat in self.seats.items() if seat.method}
        poller = select.poll()  # select() fails on descriptors from 1024 on
        for descriptor, episode in waiting.items():
            poller.register(descriptor, select.POLLIN | (select.POLLOUT if self.seats[episode].outgoing else 0))
        left = min((self.seats[e].deadline for e in waiting.values()), default=0.0) - time.monotonic()
        for descriptor, _ in poller.poll(1000 * max(0.0, 0.0 if ended else min(timeout_s, left))):
            episode = waiting[descriptor]
            transition = self._advance(self.seats[episode])
            if transition is not None:
                self.seats[episode].method = ""
                ended.append((episode, transition))
        for episode in waiting.values():
            seat = self.seats[episode]
            if seat.method and time.monotonic() >= seat.deadline:
                ended.append((episode, over_time(self.pattern, seat.method, self.limits)))
                seat.method = ""
        for episode, transition in ended:
            if transition.status in ("timeout", "killed", "too_long"):
                self.discard(episode, kill=True)
        return ended

    def discard(self, episode: int, *, kill: bool = False) -> None:
        """Ends an episode's process: closes its channel, on which it closes its environment, unless it is killed."""
        seat = self.seats.pop(episode, None)
        if seat is not None:
            seat.channel.close()
            self._ask(b"K" if kill else b"E", seat.number)

    def close(self) -> None:
        """Ends all processes and waits for that."""
        self._failed.clear()
        for episode in list(self.seats):
            self.discard(episode, kill=True)
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._nursery is not None:
            try:
                self._nursery.wait(timeout=10.0)
            except subprocess.TimeoutExpired:  # only a machine that stands still gets here
                os.killpg(self._nursery.pid, signal.SIGKILL)
                self._nursery.wait()
            self._nursery = None

    def _seat(self, episode: int) -> _Seat:
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        try:
            with theirs:
                if not self._ask(b"F", number, theirs):  # the nursery was killed: its successor
                    self._leave_nursery()
                    self.start()
                    if not self._ask(b"F", number, theirs):
                        raise OSError("the process that episodes are forked from has ended.")
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        seat = self.seats[episode] = _Seat(number, ours)
        return seat

    def _leave_nursery(self) -> None:
        """Leaves a nursery that has ended; the processes of its episodes end with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
            self._nursery = None

    def _ask(self, kind: bytes, number: int, channel: socket.socket | None = None) -> bool:
        if self._control is None:
            return False
        descriptors = [] if channel is None else [channel.fileno()]
        try:
            socket.send_fds(self._control, [struct.pack(">cq", kind, number)], descriptors)
        except (BrokenPipeError, ConnectionError):
            return False
        return True

    def _advance(self, seat: _Seat) -> Transition | None:
        """Writes and reads what can be without waiting; the transition once it is complete."""
        try:
            if seat.outgoing:
                seat.outgoing = seat.outgoing[seat.channel.send(seat.outgoing) :]
            part = seat.channel.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionError:
            part = b""
        if not part:
            return at_fault(self.pattern, seat.method, "killed", f"its process ended during {seat.method}")
        seat.incoming += part
        if len(seat.incoming) < 4:
            return None
        (size,) = struct.unpack(">I", seat.incoming[:4])
        if size > 12 * self.limits.max_observation_chars + 4 * LONGEST_INFO:  # JSON writes 12 characters for some
            return at_fault(self.pattern, seat.method, "too_long", f"{seat.method} answered {size} bytes")
        if len(seat.incoming) < 4 + size:
            return None
        body, seat.incoming = bytes(seat.incoming[4 : 4 + size]), bytearray()
        return _restored(body)


def _restored(body: bytes) -> Transition:
    """A reply read with the same care as if it came from the environment: whatever runs there may have written it."""
    try:
        values = json.loads(body)
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
