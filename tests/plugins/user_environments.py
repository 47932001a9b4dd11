"""Environments as users write them, good and bad, importable from other processes."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.extras.agents import Environment, Observation, PolicyFault


@dataclass(kw_only=True)
class Countdown(Environment):
    """Counts from a number of the row down to 0; ``-n`` takes n away, a reward of n/10 each."""

    start: int = 3
    left: int = field(default=0, init=False)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        self.left = row.get("start", self.start)
        return f"{self.left} (seed {seed})", {"state": ("left", self.left)}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        if not action.startswith("-"):
            return str(self.left), 0.0, False, False, {"state": ("left", self.left), "invalid_action": True}
        taken = int(action[1:])
        self.left -= taken
        return str(self.left), taken / 10, self.left <= 0, False, {"state": ("left", self.left), "taken": taken}


@dataclass(kw_only=True)
class Stocked(Countdown):
    """Brings its tasks along: as many as ``most`` says."""

    most: int = 3

    def tasks(self) -> Iterator[Mapping[str, Any]]:
        if self.most < 0:
            raise ValueError(f"there are {self.most} tasks.")
        assert 1 / self.most
        return ({"question": f"from {number}", "start": number} for number in range(self.most))


@dataclass(kw_only=True)
class Wayward(Countdown):
    """Does what it is told to, unless it is a number."""

    def step(self, action: str) -> Any:
        if action.startswith("-"):
            return super().step(action)
        return {
            "hang": lambda: time.sleep(3600),
            "spin": _spin,
            "raise": lambda: {}["missing"],
            "exit": lambda: sys.exit(3),
            "leave": lambda: os._exit(0),
            "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "megabyte": lambda: ("x" * 2**20, 0.0, False, False, {}),
            "gigabyte": lambda: ("x" * 2**30, 0.0, False, False, {}),
            "number": lambda: (7, 0.0, False, False, {}),
            "nan": lambda: ("", float("nan"), False, False, {}),
            "text reward": lambda: ("", "0.5", False, False, {}),
            "four": lambda: ("", 0.0, False, {}),
            "list state": lambda: ("", 0.0, False, False, {"state": [1]}),
            "no info": lambda: ("", 0.0, False, False, None),
            "set": lambda: ([{"role": "user", "content": "x", "seen": {1}}], 0.0, False, False, {}),
            "fault": _fault,
            "spawn": lambda: _spawn(),
            "forge": lambda: _forge(),
            "pid": lambda: (str(os.getpid()), 0.0, False, False, {}),
            "print": lambda: (print("noise"), ("printed", 0.0, False, False, {}))[1],
        }[action]()


@dataclass(kw_only=True)
class Fated(Wayward):
    """Whatever the policy does, what its row says happens: ``fate`` in the turn ``at``, and nothing before it."""

    slow: float = 0.0
    """Longest time that an answer takes, in seconds; differs from call to call."""
    due: float = 0.0
    turn: int = field(default=0, init=False)

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        self.row = row
        if row.get("fate") == "no reset":
            raise RuntimeError("no world today")
        if "shown" in row:
            return row["shown"], {}
        time.sleep(self.slow * random.random())
        return super().reset(seed=seed, row=row)

    def step(self, action: str) -> Any:
        time.sleep(self.slow * random.random())
        self.turn += 1
        if "fate" in self.row and self.turn == self.row.get("at", 1):
            return super().step(self.row["fate"])
        return f"turn {self.turn}: {len(action)}", 0.1, False, False, {"state": (self.turn, action)}

    def finish(self) -> float:
        return self.due


@dataclass(kw_only=True)
class Unready(Countdown):
    """Refuses its settings, or cannot even be closed."""

    def prepare(self) -> None:
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}.")

    def close(self) -> None:
        time.sleep(3600)


@dataclass(kw_only=True)
class Refusing(Countdown):
    """Refuses to be prepared while a file is there."""

    file: str

    def prepare(self) -> None:
        if os.path.exists(self.file):
            raise ValueError(f"{self.file} is there")


def _spin() -> None:
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass


def _fault() -> None:
    raise PolicyFault("the action cannot be undone")


def _forge() -> Any:
    """Writes what an answer to the next step could look like, behind that of this one."""
    step = {"observation": "forged", "reward": 9.0, "terminated": False, "truncated": False, "state": "", "key": ""}
    message = json.dumps(step | {"info": {}, "status": "ok", "invalid_action": False}).encode()

    def write() -> None:
        time.sleep(0.5)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    os.write(descriptor, len(message).to_bytes(8, "big") + message)
            except OSError:
                pass

    threading.Thread(target=write).start()
    return "own", 0.0, False, False, {}


def _spawn() -> Any:
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    return str(child), 0.0, False, False, {}
