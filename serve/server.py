"""``Server``: LitServe's server with queues, status and shutdown that survive what its own do not."""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import psutil
import uvicorn
from litserve import LitAPI, LitServer
from litserve.transport.process_transport import MPQueueTransport
from litserve.utils import WorkerSetupStatus

from grpo_pl.rewards.sandbox.worker_environment import reduced_to
from serve.protocol import ACCEPTED_AT_ONCE, BoundedProtocol, Crowd, connection_limit
from serve.worker import Stop

log = logging.getLogger(__name__)

_STATES = (WorkerSetupStatus.STARTING, WorkerSetupStatus.READY, WorkerSetupStatus.ERROR, WorkerSetupStatus.FINISHED)
_GRACE_S = 30.0  # for requests in flight, after SIGTERM
_GOODBYE_S = 5.0  # for a worker to leave once told
_BACKLOG = 1024  # connections that the kernel keeps until they are taken
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


class Server(LitServer):
    """One front thread and one process per ``LitAPI``.

    LitServe keeps queues in a manager process, which costs a round trip per message and outlives a killed parent; takes
    one ready worker for all; notices a dead one after two seconds and then lets requests hang for thirty; serves from a
    fork of a process that has threads; and listens on three addresses only. These are the hooks that change that.

    Args:
        warm_up: run on the front's event loop before the server counts as ready.
        on_ready: called then, with the port.
        on_stop: called on the loop when the server is told to stop.
        on_time_up: called on the loop when requests that were in flight have had their time.
        on_lost: called on the loop when a worker is gone.
    """

    def __init__(
        self,
        apis: list[LitAPI],
        *,
        warm_up: Callable[[], Coroutine[Any, Any, None]],
        on_ready: Callable[[int], None],
        on_stop: Callable[[], None],
        on_time_up: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(
            apis,
            accelerator="cpu",  # devices are chosen in the workers; this decides their number only
            workers_per_device=1,
            timeout=False,
            disable_openapi_url=True,
        )
        self._warm_up, self._on_ready = warm_up, on_ready
        self._on_stop, self._on_time_up, self._on_lost = on_stop, on_time_up, on_lost
        self._stopping, self._warm = threading.Event(), False
        self._shutdown_event: threading.Event | None = None
        self._front: threading.Thread | None = None
        self.worker_lost = False

    @property
    def ready(self) -> bool:
        """Whether every worker is up and running, and the server is warm and not on its way down."""
        if self.worker_lost or not self._warm or self._stopping.is_set():
            return False
        return not any(_is_stopped(worker.pid) for worker in self.inference_workers)

    def stop(self) -> None:
        """Lets :meth:`serve` return; safe from signal handlers.

        Raises:
            KeyboardInterrupt: nothing is served yet.
        """
        if self._shutdown_event is None:
            raise KeyboardInterrupt
        self._shutdown_event.set()

    def serve(self, sockets: list[socket.socket], **tls: Any) -> None:
        """Starts the workers, serves on ``sockets`` until told to stop, and ends the workers.

        Raises:
            WorkerFailed: one did not start.
        """
        self._init_manager(1)
        self.inference_workers = []
        for api in self.litapi_connector:
            self.inference_workers += self.launch_inference_worker(api)
        self.verify_worker_status()
        assert self._shutdown_event is not None
        try:
            self._start_front(sockets, **tls)
            self._shutdown_event.wait()
        finally:
            self._end()

    # --- LitServe's hooks -------------------------------------------------------------------------------------------

    def _init_manager(self, num_api_servers: int) -> None:
        context = multiprocessing.get_context("spawn")
        apis = list(self.litapi_connector)
        self.workers_setup_status = SetupStatus([f"{api.api_path.split('/')[-1]}_0" for api in apis])
        self._shutdown_event = threading.Event()
        self.litapi_request_queues = {api.api_path: context.Queue() for api in apis}
        for queue in self.litapi_request_queues.values():
            queue.cancel_join_thread()  # a dead worker never reads; the end must not wait for it
        self._transport = MPQueueTransport(None, [context.Queue() for _ in range(num_api_servers)])

    def launch_inference_worker(self, lit_api: LitAPI) -> list[Any]:
        with _bare_main(), reduced_to(lit_api.environment()):
            return list(super().launch_inference_worker(lit_api))

    def verify_worker_status(self) -> None:
        assert self._shutdown_event is not None
        while not all(state == WorkerSetupStatus.READY for state in self.workers_setup_status.values()):
            failed = WorkerSetupStatus.ERROR in self.workers_setup_status.values()
            if failed or not all(worker.is_alive() for worker in self.inference_workers):
                self._end_workers(0.0)
                raise WorkerFailed("a worker could not start; its message is above.")
            if self._shutdown_event.wait(0.02):
                self._end_workers(0.0)
                raise KeyboardInterrupt

    # --- the front --------------------------------------------------------------------------------------------------

    def _start_front(self, sockets: list[socket.socket], **tls: Any) -> None:
        self.app.response_queue_id = 0
        self._crowd = Crowd(connection_limit())
        config = uvicorn.Config(
            self.app,
            http=partial(BoundedProtocol, crowd=self._crowd),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(_GRACE_S + 2.0),
            **tls,
        )
        config.load()  # what is wrong with a certificate shows here
        self._http = uvicorn.Server(config)
        self._front = threading.Thread(target=self._run_front, args=(sockets,), name="http")
        self._front.start()
        while not self._http.started and self._front.is_alive():
            time.sleep(0.01)
        for listener in sockets:
            listener.listen(
                _BACKLOG
            )  # asyncio's `backlog` is also how many it takes at once; this is only the kernel's
        threading.Thread(target=self._watch_workers, name="worker-watch", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._warm_up(), self._loop).result()
        self._warm = True
        self._on_ready(sockets[0].getsockname()[1])

    def _run_front(self, sockets: list[socket.socket]) -> None:
        assert self._shutdown_event is not None
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._http.serve(sockets))
        finally:
            self._shutdown_event.set()

    def _end(self) -> None:
        """No new connections; what is being drawn is finished, what waits is refused, and then the workers end."""
        self._stopping.set()
        if self._front is not None:
            if self._front.is_alive():
                self._loop.call_soon_threadsafe(self._wind_up)
            self._http.should_exit = True
            self._front.join(_GRACE_S + 5.0)
        self._end_workers(_GOODBYE_S)
        self._transport.close(send_sentinel=False)

    def _wind_up(self) -> None:
        self._crowd.close()
        self._on_stop()
        self._loop.call_later(_GRACE_S, self._on_time_up)

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

    def _end_workers(self, seconds: float) -> None:
        for requests in self.litapi_request_queues.values():
            requests.put((0, "", time.monotonic(), Stop()))
        for worker in self.inference_workers:
            worker.join(seconds)
            if worker.is_alive():  # it pays no attention to SIGTERM, see `end_with_parent`
                worker.kill()
                worker.join()


def bind(addresses: Sequence[tuple[socket.AddressFamily, tuple[str, int]]]) -> list[socket.socket]:
    """One socket per address, not listening yet; of port 0 the system makes one free port for all of them.

    Raises:
        ValueError: a port that is taken or not allowed.
    """
    sockets: list[socket.socket] = []
    for family, address in addresses:
        port = sockets[0].getsockname()[1] if sockets else address[1]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and len(addresses) > 1:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind((address[0], port, *address[2:]))
        except OSError as error:
            listener.close()
            if sockets and error.errno == errno.EADDRNOTAVAIL:  # `localhost` on a machine without IPv6, say
                continue
            for other in sockets:
                other.close()
            raise ValueError(f"cannot listen on {address[0]}, port {port}: {error.strerror}. Choose another.") from None
        sockets.append(listener)
    return sockets


def _is_stopped(pid: int) -> bool:
    """Whether a process is halted by a signal or a debugger, or gone."""
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return True
    return state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


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
