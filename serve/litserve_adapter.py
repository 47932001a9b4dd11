"""The only module that uses LitServe's internals: starts its worker processes and leaves out the rest."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from litserve import LitAPI, LitServer
from litserve.loops import LitLoop
from litserve.utils import WorkerSetupStatus

from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.processes.variables import reduced_to
from serve.worker_channel import FrontChannel

_LONGEST = 2000  # bytes of a complaint


class Worker(LitAPI):
    """One worker process. The front process answers HTTP itself and exchanges messages with it over a socket."""

    def __init__(self, name: str) -> None:
        super().__init__(
            api_path=f"/{name}",
            stream=True,  # or LitServe would compress every answer
            loop=_WholeProcess(),
        )
        self._complaint = multiprocessing.get_context("spawn").Array("c", _LONGEST, lock=False)

    @property
    def complaint(self) -> str:
        """Why the process ended before it was ready, where its user can put that right; read by the front process."""
        return self._complaint.value.decode(errors="ignore")

    def setup(self, device: str) -> None:
        try:
            self.prepare()
        except (ValueError, OSError, ImportError, CheckpointError) as error:  # LitServe would print a traceback
            line = " ".join(str(error).split()) or type(error).__name__
            self._complaint.value = line.encode()[: _LONGEST - 1]
            os._exit(1)
        gc.collect()
        gc.freeze()  # looking at all that imports have made would interrupt the work for a tenth of a second and more

    def prepare(self) -> None:
        """Sets up the process. What its user can put right is a ``ValueError``, ``OSError``, ``ImportError`` or
        ``CheckpointError``, of which the front process tells in one line."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        raise NotImplementedError

    def work(self, front: FrontChannel) -> None:
        """Runs the process after its setup; never returns.

        Raises:
            SystemExit: the front process has ended or closed the connection.
        """
        raise NotImplementedError


class _WholeProcess(LitLoop):
    """Runs :meth:`Worker.work` in place of LitServe's loops, which batch whole requests and return whole answers."""

    def run(self, lit_api: Worker, device: str, worker_id: int, request_queue: socket.socket, *_: Any) -> None:
        try:
            lit_api.work(FrontChannel(request_queue))
        except SystemExit:
            os._exit(0)  # the normal exit of an interpreter with torch takes seconds


class SetupStatus:
    """The state of each worker in shared memory; replaces LitServe's dictionary in a manager process."""

    _STATES = (WorkerSetupStatus.STARTING, WorkerSetupStatus.READY, WorkerSetupStatus.ERROR)

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(keys)
        self._states = multiprocessing.get_context("spawn").Array("B", len(self._keys), lock=False)

    def __setitem__(self, key: str, state: str) -> None:
        self._states[self._keys.index(key)] = self._STATES.index(state)

    @property
    def states(self) -> set[str]:
        return {self._STATES[state] for state in self._states}


class Launcher(LitServer):
    """Starts LitServe's worker processes without its queues, its manager process and its routes.

    LitServe's queues need a thread and a round trip per message, through a process that outlives a killed parent.
    LitServe counts as ready once one worker is, notices a dead worker after two seconds, and lets requests hang for
    thirty more.
    """

    def __init__(self, workers: list[Worker]) -> None:
        super().__init__(
            list(workers),
            accelerator="cpu",  # decides only the number of workers; each chooses its device itself
            workers_per_device=1,
            timeout=False,
            disable_openapi_url=True,
        )
        self._transport = None
        self._workers = workers

    def launch(self) -> tuple[list[Any], list[socket.socket]]:
        """Starts the workers; returns their processes, and this process's ends of their sockets."""
        self.workers_setup_status = SetupStatus([f"{worker.api_path[1:]}_0" for worker in self._workers])
        processes, ours = [], []
        for worker in self._workers:
            end, theirs = socket.socketpair()
            self.litapi_request_queues[worker.api_path] = theirs
            with _bare_main(), reduced_to(worker.environment()), theirs:
                processes += self.launch_inference_worker(worker)
            ours.append(end)
        return processes, ours


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
