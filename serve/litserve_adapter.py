"""Starts LitServe's worker processes for this server; the only module that relies on how LitServe starts them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from litserve import LitAPI
from litserve.callbacks import CallbackRunner
from litserve.loops import LitLoop, inference_worker

from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.processes.variables import reduced_to
from serve.worker_channel import FrontChannel, WorkerTask, end_with_parent

_LONGEST = 2000  # bytes of a complaint


class WorkerProcess(LitAPI):
    """A ``WorkerTask`` in a process of its own. The front process answers HTTP itself and exchanges messages with it
    over a socket."""

    def __init__(self, name: str, task: WorkerTask) -> None:
        super().__init__(
            api_path=f"/{name}",
            stream=True,  # or LitServe would compress every answer
            loop=_WholeProcess(),
        )
        self.task = task
        shared = multiprocessing.get_context("spawn")
        self._ready, self._complaint = shared.Value("b", 0, lock=False), shared.Array("c", _LONGEST, lock=False)

    @property
    def ready(self) -> bool:
        """True once the process is set up; read by the front process."""
        return bool(self._ready.value)

    @property
    def complaint(self) -> str:
        """Why the process ended before it was ready, where its user can put that right; read by the front process."""
        return self._complaint.value.decode(errors="ignore")

    def setup(self, device: str) -> None:
        try:
            end_with_parent()
            self.task.prepare()
        except (ValueError, OSError, ImportError, CheckpointError) as error:  # LitServe would print a traceback
            line = " ".join(str(error).split()) or type(error).__name__
            self._complaint.value = line.encode()[: _LONGEST - 1]
            os._exit(1)
        gc.collect()
        gc.freeze()  # looking at all that imports have made would interrupt the work for a tenth of a second and more
        self._ready.value = 1


class _WholeProcess(LitLoop):
    """Runs the task in place of LitServe's loops, which batch whole requests and return whole answers."""

    def run(self, lit_api: WorkerProcess, device: str, worker_id: int, request_queue: socket.socket, *_: Any) -> None:
        try:
            lit_api.task.work(FrontChannel(request_queue))
        except SystemExit:
            os._exit(0)  # the normal exit of an interpreter with torch takes seconds


def launch(worker: WorkerProcess) -> tuple[Any, socket.socket]:
    """Starts LitServe's worker for ``worker``, with a socket for LitServe's queues: those need a thread and a round
    trip per message, through a process that outlives a killed parent.

    Returns:
        The process, and this process's end of the socket.
    """
    ours, theirs = socket.socketpair()
    # the device is the task's choice, and there is neither a transport, a status to report, nor a restart
    arguments: tuple[Any, ...] = (worker, "cpu", 0, theirs, None, {}, CallbackRunner(), False)
    process = multiprocessing.get_context("spawn").Process(target=inference_worker, args=arguments)
    with _bare_main(), reduced_to(worker.task.environment()), theirs:
        process.start()
    return process, ours


@contextmanager
def _bare_main() -> Iterator[None]:
    """Context manager: processes spawned within it do not import the program that started the server, which may import
    much that a worker does not need."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
