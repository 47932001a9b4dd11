"""All that is known here of LitServe's inside: how it starts worker processes, and what it does not get to do."""

from __future__ import annotations

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

from grpo_pl.rewards.sandbox.worker_environment import reduced_to
from serve.worker import Mailbox


class Worker(LitAPI):
    """One worker process. The front process talks to it over a socket and answers HTTP by itself."""

    def __init__(self, name: str) -> None:
        super().__init__(
            api_path=f"/{name}",
            stream=True,  # or LitServe would compress every answer
            loop=_WholeProcess(),
        )

    def environment(self) -> dict[str, str]:
        """The variables that the process gets."""
        raise NotImplementedError

    def work(self, mailbox: Mailbox) -> None:
        """What the process does once it is set up; never returns.

        Raises:
            SystemExit: the front process is gone, or wants nothing any more.
        """
        raise NotImplementedError


class _WholeProcess(LitLoop):
    """Hands the process to :meth:`Worker.work`; LitServe's own loops batch requests that come whole and go whole."""

    def run(self, lit_api: Worker, device: str, worker_id: int, request_queue: socket.socket, *_: Any) -> None:
        try:
            lit_api.work(Mailbox(request_queue))
        except SystemExit:
            os._exit(0)  # taking an interpreter with torch apart takes seconds and nothing depends on it


class SetupStatus:
    """Which workers are ready, in shared memory; stands in for a dictionary of a manager process."""

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
    """LitServe's worker processes, without its queues, its manager process and its routes.

    Its queues cost a thread and a round trip per message, through a process that outlives a killed parent; it takes one
    ready worker for all, and notices a dead one after two seconds, to let requests hang for thirty more.
    """

    def __init__(self, workers: list[Worker]) -> None:
        super().__init__(
            list(workers),
            accelerator="cpu",  # devices are chosen in the workers; this decides their number only
            workers_per_device=1,
            timeout=False,
            disable_openapi_url=True,
        )
        self._transport = None
        self._workers = workers

    def launch(self) -> tuple[list[Any], list[socket.socket]]:
        """Starts the workers; their processes, and this process's ends of their sockets."""
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
    """Keeps spawned processes from importing the program that started the server, which may import far too much."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
