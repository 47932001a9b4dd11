"""The engine's child process: it loads weights, draws, and ends when its parent does."""

from __future__ import annotations

import os
import pickle
import platform
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

import grpo_pl
from grpo_pl.extras.engines.child.tensors import SharedMemory
from grpo_pl.processes.channel import Channel
from grpo_pl.processes.modules import load_name
from grpo_pl.rollout.engine import ProgressFn
from grpo_pl.types import GenerateRequest, Rollout

_SECRET = re.compile("(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|_)")
_PROGRESS_S = 0.1
"""Least seconds between two messages about progress."""


class Worker(Protocol):
    """An engine inside the child process; its constructor takes the settings as keywords. One that has an ``engine`` of
    its own and its ``model`` draws the turns of episodes with that."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Takes the whole policy's weights by the names of its checkpoints, and forgets what it computed with others.
        Tensors arrive while it iterates, in memory that may be read-only: what it keeps it copies."""

    def generate(self, request: GenerateRequest, *, progress: ProgressFn, should_stop: Callable[[], bool]) -> Rollout:
        """As `RolloutEngine.generate` without the model, on whatever device."""


class Host:
    """Answers one message after the other."""

    def __init__(self, channel: Channel, memory: SharedMemory) -> None:
        self._channel, self._memory = channel, memory
        self._worker: Worker | None = None
        self._told_at = 0.0
        self._untold: tuple[int, int] | None = None  # the newest progress, not sent yet

    def run(self) -> NoReturn:
        """Ends the process when the parent closes the channel."""
        while True:
            kind, *arguments = self._receive()
            if kind == "stop":  # for a rollout that was complete when it arrived
                continue
            try:
                answer = getattr(self, f"on_{kind}")(*arguments)
            except Exception as error:
                self._send("error", portable(error))
            else:
                self._send("done", answer)

    def on_start(self, worker: str, settings: dict[str, Any]) -> None:
        self._worker = load_name(worker)(**settings)

    def on_load(self) -> None:
        assert self._worker is not None
        weights = self._arriving()
        try:
            self._worker.load(weights)
        finally:
            for _ in weights:  # those that nobody wanted, for the parent sends them all
                pass

    def on_generate(self, request: GenerateRequest) -> Rollout:
        assert self._worker is not None
        rollout = self._worker.generate(request, progress=self._progress, should_stop=self._told_to_stop)
        if self._untold is not None:
            self._send("progress", self._untold)
        return rollout

    def on_sleep(self) -> None:
        worker: Any = self._worker  # one that can
        worker.sleep()

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            _, placed = self._receive()
            if placed is None:
                return
            tensors = self._memory.read(placed)
            self._send("done", None)
            yield from tensors.items()

    def _progress(self, tokens: int, finished: int) -> None:
        now, self._untold = time.monotonic(), (tokens, finished)
        if now - self._told_at >= _PROGRESS_S:
            self._send("progress", self._untold)
            self._told_at, self._untold = now, None

    def _told_to_stop(self) -> bool:
        return self._channel.poll() and self._receive()[0] == "stop"

    def _send(self, *message: Any) -> None:
        try:
            self._channel.send(pickle.dumps(message))
        except OSError:
            os._exit(0)

    def _receive(self) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = pickle.loads(self._channel.receive())
        except (EOFError, OSError):
            os._exit(0)  # nothing is saved here, and libraries' exit handlers take time
        return message


def forget_secrets() -> None:
    """Takes tokens, keys and passwords out of this process's environment."""
    for name in list(os.environ):
        if _SECRET.search(name.upper()):
            del os.environ[name]


def versions() -> dict[str, str]:
    """Versions that must be equal on all hosts of a run."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": str(torch.__version__), "grpo_pl": grpo_pl.__version__}


def portable(error: Exception) -> Exception:
    """An error that the parent can read without importing what the worker did."""
    kind = type(error)
    if kind.__module__.startswith("grpo_pl.") or kind is ValueError:
        return error
    return RuntimeError(f"the engine's process failed:\n{''.join(traceback.format_exception(error)).rstrip()}")


def main(channel: Channel, parent: int, memory: str) -> None:
    """The entry of the process; ``memory`` is the descriptor of memory that it shares with its parent."""
    os.set_inheritable(int(memory), False)  # programs that the worker starts do not keep it open
    for number in (signal.SIGINT, signal.SIGTERM):  # schedulers send them to all processes: the parent decides
        signal.signal(number, signal.SIG_IGN)
    Host(channel, SharedMemory(int(memory))).run()
