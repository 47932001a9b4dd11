"""``EngineProcess``: starts a process with a `Worker`, asks it, and notices its death."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from grpo_pl.extras.engines.child.tensors import SharedMemory
from grpo_pl.policy.weights import bucketed
from grpo_pl.processes.child_process import ChildProcess
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted

BUCKET_BYTES = 128 * 2**20
"""Weights that are handed over at a time; they are in memory twice meanwhile."""
POLL_S = 0.02
STOP_LIMIT_S = 10.0
"""Seconds in which a worker that is told to stop must have answered."""
Watch = Callable[[], bool | None]
"""Called again and again while the worker works: true tells it to stop, what this raises ends the process."""


class EngineProcess:
    """A Python process with one worker in it. It ends with this process, or as soon as this object is gone.

    Args:
        worker: ``module:Class`` of a `grpo_pl.extras.engines.child.main.Worker`, imported there.
        settings: its arguments.
        environment: variables that the process gets besides those of this one.
        watch: called again and again until it is ready; what it raises ends the process.

    Raises:
        EngineDied: it ended before it was ready.
        ValueError: the worker refuses its settings.
    """

    def __init__(
        self, worker: str, settings: Mapping[str, Any], environment: Mapping[str, str], *, watch: Watch | None = None
    ) -> None:
        self._memory = SharedMemory()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = ChildProcess(
            "grpo_pl.extras.engines.child.main:main",
            str(self._memory.descriptor),
            environment={**os.environ, "PYTHONPATH": paths, **environment},
            descriptors=[self._memory.descriptor],
            keep_output=True,
        )
        try:
            self.ask("start", worker, dict(settings), should_stop=watch)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, weights: Iterable[tuple[str, Tensor]], *, watch: Watch | None = None) -> None:
        """Gives the worker new weights, all of them; what ``watch`` raises ends the process.

        Raises:
            EngineDied: the process ended; what is left of ``weights`` was not read.
            ValueError, RuntimeError: the worker cannot take them. Where it fails to read what it was handed, the
                process is ended too, and what is left of ``weights`` was not read.
        """
        with self._exchange():
            self._send("load")
            for bucket in bucketed(weights, BUCKET_BYTES):
                self._send("bucket", self._memory.write(bucket))
                kind, value = self._answer(should_stop=watch)
                if kind == "error":
                    raise value
        self.ask("bucket", None, should_stop=watch)

    def ask(self, *message: Any, progress: ProgressFn | None = None, should_stop: Watch | None = None) -> Any:
        """Asks the worker and returns its answer.

        Raises:
            EngineDied: the process ended instead.
            RolloutInterrupted: ``should_stop`` turned true.
            ValueError: the worker cannot do it.
            RuntimeError: any other error of the worker, with its traceback.
        """
        with self._exchange():
            self._send(*message)
            kind, value = self._answer(progress, should_stop)
        if kind == "error":
            raise value
        return value

    def kill(self) -> None:
        """Ends the process while another thread is asking it."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process. Killed, not asked: it has nothing to save, and may be in the middle of something long."""
        self._process.close()
        self._memory.close()

    @property
    def closed(self) -> bool:
        return self._process.closed

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Ends the process where an exchange breaks off: its next answer would be that to an earlier question."""
        if self.closed:
            raise EngineDied("the engine's process was ended before.")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _answer(self, progress: ProgressFn | None = None, should_stop: Watch | None = None) -> tuple[str, Any]:
        """("done", result) or ("error", exception)."""
        deadline = float("inf")
        while True:
            if deadline == float("inf") and should_stop is not None and should_stop():
                self._send("stop")
                deadline = time.monotonic() + STOP_LIMIT_S
            if time.monotonic() > deadline:
                raise RolloutInterrupted
            channel = self._process.channel
            if not channel.poll(POLL_S):
                if not self._process.is_alive and not channel.poll():  # others may hold the channel's other end
                    raise self._death()
                continue
            try:
                kind, value = pickle.loads(channel.receive())
            except (EOFError, OSError):
                raise self._death() from None
            if kind != "progress":
                return kind, value
            if progress is not None:
                progress(*value)

    def _send(self, *message: Any) -> None:
        if not self._process.is_alive:
            raise self._death()
        try:
            self._process.channel.send(pickle.dumps(message))
        except OSError:
            raise self._death() from None

    def _death(self) -> EngineDied:
        return EngineDied(f"the engine's process {self.pid} {self._process.death()}")
