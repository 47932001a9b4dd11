"""``ChildProcess``: starts a process with a `Worker`, asks it, notices its death, and takes it along at every end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from torch import Tensor

from grpo_pl.rollout.child.link import SharedMemory, buckets, receive, send
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted

BUCKET_BYTES = 256 * 2**20
"""Weights that are handed over at a time."""
_LOOK_EVERY_S = 0.02
_STOPS_WITHIN_S = 10.0
_ENDS_WITHIN_S = 2.0
_LAST_LINES = 12


class ChildProcess:
    """A Python process with one worker in it. It ends with this process, or as soon as this object is gone.

    Args:
        worker: ``module:Class`` of a `grpo_pl.rollout.child.main.Worker`, imported there.
        settings: its arguments.
        environment: variables that the process gets besides those of this one.
        should_stop: asked until it is ready; once true, the process is ended.

    Raises:
        EngineDied: it ended before it was ready.
        RolloutInterrupted: ``should_stop`` turned true.
        ValueError: the worker refuses its settings.
    """

    def __init__(
        self,
        worker: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._pipe, theirs = Pipe()
        self._memory = SharedMemory()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        inherited = (theirs.fileno(), self._memory.descriptor)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_pl.rollout.child.main", *map(str, inherited), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C on the terminal is for this process, which then ends the other
        )
        theirs.close()
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._process, self._pipe, self._memory, self._output
        )
        try:
            self.ask("start", worker, dict(settings), should_stop=_at_once(should_stop))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, weights: Iterable[tuple[str, Tensor]], *, should_stop: Callable[[], bool] | None = None) -> None:
        """Gives the worker new weights, all of them; once ``should_stop`` returns true, the process is ended.

        Raises:
            EngineDied: the process ended; what is left of ``weights`` was not read.
            RolloutInterrupted: ``should_stop`` turned true; the same.
            ValueError, RuntimeError: the worker cannot take them. Where it fails to read what it was handed, the
                process is ended too, and what is left of ``weights`` was not read.
        """
        with self._whole_exchange():
            self._send("load")
            for placed in buckets(weights, self._memory, BUCKET_BYTES):
                self._send("bucket", placed)
                kind, value = self._answer(should_stop=_at_once(should_stop))
                if kind == "error":
                    raise value
            self._send("bucket", None)
            kind, value = self._answer(should_stop=_at_once(should_stop))
        if kind == "error":
            raise value

    def ask(
        self,
        *message: Any,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Any:
        """What the worker answers.

        Raises:
            EngineDied: the process ended instead.
            RolloutInterrupted: ``should_stop`` turned true.
            ValueError: the worker cannot do it.
            RuntimeError: any other error of the worker, with its traceback.
        """
        with self._whole_exchange():
            self._send(*message)
            kind, value = self._answer(progress, should_stop)
        if kind == "error":
            raise value
        return value

    def kill(self) -> None:
        """Ends the process while another thread is asking it."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @contextmanager
    def _whole_exchange(self) -> Iterator[None]:
        """Ends the process where an exchange breaks off: its next answer would be that to an earlier question."""
        if self.closed:
            raise EngineDied("the engine's process was ended before.")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _answer(
        self, progress: ProgressFn | None = None, should_stop: Callable[[], bool] | None = None
    ) -> tuple[str, Any]:
        """("done", result) or ("error", exception)."""
        deadline = float("inf")
        while True:
            if deadline == float("inf") and should_stop is not None and should_stop():
                self._send("stop")
                deadline = time.monotonic() + _STOPS_WITHIN_S
            if time.monotonic() > deadline:
                raise RolloutInterrupted
            if not self._pipe.poll(_LOOK_EVERY_S):
                if self._process.poll() is not None and not self._pipe.poll():  # others may hold its end of the pipe
                    raise self._death()
                continue
            try:
                kind, value = receive(self._pipe)
            except (EOFError, OSError):
                raise self._death() from None
            if kind != "progress":
                return kind, value
            if progress is not None:
                progress(*value)

    def _send(self, *message: Any) -> None:
        if self._process.poll() is not None:
            raise self._death()
        try:
            send(self._pipe, *message)
        except OSError:
            raise self._death() from None

    def _death(self) -> EngineDied:
        """What the process ended by, and what it said last."""
        try:
            status = self._process.wait(timeout=_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:  # it closed the pipe and goes on: nobody can talk to it any more
            status = -signal.SIGKILL
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        lines = _tail(self._output)
        said = "it printed nothing" if not lines else "its last lines:\n" + "\n".join(f"  {line}" for line in lines)
        return EngineDied(f"the engine's process {self.pid} ended by {how}; {said}")


def _at_once(should_stop: Callable[[], bool] | None) -> Callable[[], bool]:
    """For what a worker cannot be told to stop."""

    def interrupt() -> bool:
        if should_stop is not None and should_stop():
            raise RolloutInterrupted
        return False

    return interrupt


def _tail(output: IO[bytes]) -> list[str]:
    end = output.seek(0, os.SEEK_END)
    output.seek(max(0, end - 8192))
    text = output.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def _end(
    owner: int, process: subprocess.Popen[bytes], pipe: Connection, memory: SharedMemory, output: IO[bytes]
) -> None:
    """Killed, not asked: it has nothing to save, and may be in the middle of something long."""
    pipe.close()
    memory.close()
    output.close()
    if os.getpid() == owner:  # a process that was forked from the owner has no say
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
