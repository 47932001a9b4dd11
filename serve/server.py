"""``Server``: LitServe's server with queues, status and shutdown that survive what its own do not."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import uvicorn
from litserve import LitAPI, LitServer
from litserve.transport.process_transport import MPQueueTransport
from litserve.utils import WorkerSetupStatus

log = logging.getLogger(__name__)

_STATES = (WorkerSetupStatus.STARTING, WorkerSetupStatus.READY, WorkerSetupStatus.ERROR, WorkerSetupStatus.FINISHED)
_GRACE_S = 30.0  # for requests in flight, after SIGTERM
_LAST_WORDS_S = 1.5  # between the loss of a worker and the end of the server: probes and clients learn of it


class SetupStatus:
    """Which workers are ready, in shared memory; stands in for a dictionary of a manager process."""

    def __init__(self, keys: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._codes = {key: context.Value("B", 0, lock=False) for key in keys}

    def __setitem__(self, key: str, state: str) -> None:
        self._codes[key].value = _STATES.index(state)

    def __bool__(self) -> bool:
        return bool(self._codes)

    def values(self) -> list[str]:
        return [_STATES[code.value] for code in self._codes.values()]


class _NoManager:
    """LitServe shuts a manager down at the end; here there is none."""

    def shutdown(self) -> None:
        pass


class Server(LitServer):
    """One front thread and one process per ``LitAPI``.

    LitServe keeps queues in a manager process, which costs a round trip per message and outlives a killed parent; takes
    one ready worker for all; notices a dead one after two seconds and then lets requests hang for thirty; and serves
    from a fork of a process that has threads. These are the hooks that change that.
    """

    def __init__(self, apis: list[LitAPI], *, on_ready: Callable[[], None], on_lost: Callable[[], None]) -> None:
        super().__init__(
            apis,
            accelerator="cpu",  # devices are chosen in the workers; this decides their number only
            workers_per_device=1,
            timeout=False,
            disable_openapi_url=True,
        )
        self._monitor_workers = False  # replaced by `_watch_workers`
        self._on_ready, self._on_lost = on_ready, on_lost
        self._stopping = threading.Event()
        self.worker_lost = False

    @property
    def ready(self) -> bool:
        """Whether every worker is up and the server is not on its way down."""
        if self.worker_lost or self._stopping.is_set():
            return False
        return all(state == WorkerSetupStatus.READY for state in self.workers_setup_status.values())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def stop(self) -> None:
        """Lets :meth:`run` return; safe from signal handlers."""
        self._shutdown_event.set()

    # --- LitServe's hooks -------------------------------------------------------------------------------------------

    def _init_manager(self, num_api_servers: int) -> _NoManager:
        context = multiprocessing.get_context("spawn")
        apis = list(self.litapi_connector)
        self.workers_setup_status = SetupStatus([f"{api.api_path.split('/')[-1]}_0" for api in apis])
        self._shutdown_event = threading.Event()
        self.litapi_request_queues = {api.api_path: context.Queue() for api in apis}
        for queue in self.litapi_request_queues.values():
            queue.cancel_join_thread()  # a dead worker never reads; the end must not wait for it
        self._transport = MPQueueTransport(None, [context.Queue() for _ in range(num_api_servers)])
        return _NoManager()

    def launch_inference_worker(self, lit_api: LitAPI) -> list[Any]:
        with _bare_main():
            return list(super().launch_inference_worker(lit_api))

    def verify_worker_status(self) -> None:
        while not all(state == WorkerSetupStatus.READY for state in self.workers_setup_status.values()):
            failed = WorkerSetupStatus.ERROR in self.workers_setup_status.values()
            if failed or not all(worker.is_alive() for worker in self.inference_workers):
                self._end_workers()
                raise WorkerFailed("a worker could not start; its message is above.")
            time.sleep(0.02)

    def _start_server(
        self, port: int, num_uvicorn_servers: int, log_level: str, sockets: list[Any], *args: Any, **options: Any
    ) -> dict[int, Any]:
        self.app.response_queue_id = 0
        config = uvicorn.Config(
            self.app, log_level=log_level, timeout_graceful_shutdown=int(_GRACE_S), access_log=False, **options
        )
        self._http = uvicorn.Server(config)

        def serve() -> None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._http.serve(sockets))
            self._shutdown_event.set()

        self._front = threading.Thread(target=serve, name="http")
        self._front.start()
        while not self._http.started and self._front.is_alive():
            time.sleep(0.01)
        threading.Thread(target=self._watch_workers, name="worker-watch", daemon=True).start()
        self._on_ready()
        return {}

    def _perform_graceful_shutdown(self, manager: Any, uvicorn_workers: Any, shutdown_reason: str = "normal") -> None:
        self._stopping.set()
        if hasattr(self, "_http"):
            self._http.should_exit = True  # no new connections; those in flight are finished
            self._front.join(_GRACE_S + 5.0)
        self._end_workers()
        self._transport.close(send_sentinel=False)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _watch_workers(self) -> None:
        closed = wait([worker.sentinel for worker in self.inference_workers])
        if self._stopping.is_set():
            return
        self.worker_lost = True
        gone = next(worker for worker in self.inference_workers if worker.sentinel in closed)
        gone.join(5.0)  # its pipe closes a little before it counts as ended
        log.error("worker process %s ended with code %s; the server ends too.", gone.pid, gone.exitcode)
        self._loop.call_soon_threadsafe(self._on_lost)
        time.sleep(_LAST_WORDS_S)
        self.stop()

    def _end_workers(self) -> None:
        for worker in self.inference_workers:
            worker.terminate()
        for worker in self.inference_workers:
            worker.join(5.0)
            if worker.is_alive():
                worker.kill()
                worker.join()


class WorkerFailed(RuntimeError):
    """A worker process did not come up."""


@contextmanager
def _bare_main() -> Iterator[None]:
    """Keeps spawned processes from importing the program that started the server, which may import far too much."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
