"""``Server``: starts and ends the thread that answers HTTP and the worker processes behind it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI

from serve.errors import ApiError, Refusal, shutting_down, worker_lost
from serve.litserve_adapter import WorkerProcess, launch
from serve.protocol import ACCEPTED_AT_ONCE, BoundedProtocol, ConnectionLimit, Handshake, connection_limit
from serve.worker_client import WorkerClient

log = logging.getLogger(__name__)

_GRACE_S = 30.0  # for requests in flight, after SIGTERM
_WORKER_EXIT_S = 5.0  # for a worker to end once its connection is closed
_BACKLOG = 1024  # connections that the kernel holds until they are accepted
_LOST_WORKER_S = 1.5  # between the loss of a worker and the end of the server, so that probes and clients notice it


class Server:
    """The HTTP thread and the worker processes.

    Args:
        workers: each with the client through which routes use it.
        warm_up: run on the event loop of the HTTP thread before the server counts as ready.
        on_ready: called when the server is ready, with the port.
        on_stop: called on the event loop when the server is told to stop, with a function that makes the error for
            refused requests.
    """

    def __init__(
        self,
        workers: Sequence[tuple[WorkerProcess, WorkerClient]],
        *,
        warm_up: Callable[[], Coroutine[Any, Any, None]],
        on_ready: Callable[[int], None],
        on_stop: Callable[[Callable[[], ApiError]], None],
    ) -> None:
        self._workers = [worker for worker, _ in workers]
        self._clients = [client for _, client in workers]
        refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": Refusal}}
        self.app = FastAPI(title="grpo_pl", openapi_url="", redirect_slashes=False, responses=refusals)
        self._warm_up, self._on_ready, self._on_stop = warm_up, on_ready, on_stop
        self._stopping, self._warm = threading.Event(), False
        self._serving = False
        self._stop_requests: SimpleQueue[None] = SimpleQueue()  # not an `Event`, see `stop`
        self._http_thread: threading.Thread | None = None
        self._processes: list[Any] = []
        self._worker_sockets: list[socket.socket] = []
        self._worker_lost = False
        self._refused = 0  # accepted requests, or parts of them, that were refused because the server ends

    @property
    def ready(self) -> bool:
        """True while all workers run, the warm-up is done, and the server has not been told to stop."""
        if self._worker_lost or not self._warm or self._stopping.is_set():
            return False
        return not any(_is_stopped(worker.pid) for worker in self._processes)

    def stop(self) -> None:
        """Makes :meth:`serve` return; may be called in signal handlers.

        Raises:
            KeyboardInterrupt: :meth:`serve` has not been called yet.
        """
        if not self._serving:
            raise KeyboardInterrupt
        self._stop_requests.put(None)  # an `Event` would wait for itself if another signal interrupts it

    def serve(self, sockets: list[socket.socket], **tls: Any) -> None:
        """Starts the workers, serves on ``sockets`` until told to stop, and ends the workers.

        Raises:
            ValueError: a worker did not start, for a reason that its user can put right.
            ChildProcessError: a worker did not start or was lost, or requests were refused at the end.
        """
        self._serving = True
        try:
            for worker in self._workers:
                process, end = launch(worker)
                self._processes.append(process)
                self._worker_sockets.append(end)
            self._await_workers()
            self._start_http(sockets, **tls)
            self._stop_requests.get()
        finally:
            self._shut_down()
        if self._worker_lost:
            raise ChildProcessError("a worker process was lost. Start the server again.")
        if self._refused:
            raise ChildProcessError(f"ended with {self._refused} requests or parts of them refused.")

    def _await_workers(self) -> None:
        while not all(worker.ready for worker in self._workers):
            failed = not all(process.is_alive() for process in self._processes)
            if complaint := next((worker.complaint for worker in self._workers if worker.complaint), ""):
                raise ValueError(complaint)
            if failed:
                raise ChildProcessError("a worker could not start; its message is above.")
            with suppress(Empty):
                self._stop_requests.get(timeout=0.02)
                raise KeyboardInterrupt

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def _start_http(self, sockets: list[socket.socket], **tls: Any) -> None:
        self._connections = ConnectionLimit(connection_limit())
        config = uvicorn.Config(
            self.app,
            http=partial(BoundedProtocol, limit=self._connections),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(_GRACE_S + 2.0),
            **tls,
        )
        config.load()  # raises here if the certificate cannot be used
        if config.ssl is not None:
            config.http_protocol_class = partial(Handshake, limit=self._connections, context=config.ssl)  # type: ignore[assignment]
            config.ssl = None
        self._uvicorn = uvicorn.Server(config)
        self._http_thread = threading.Thread(target=self._serve_http, args=(sockets,), name="http")
        self._http_thread.start()
        while not self._uvicorn.started and self._http_thread.is_alive():
            time.sleep(0.01)
        if not self._uvicorn.started:
            raise ChildProcessError("the HTTP thread ended at its start; its message is above.")
        for listener in sockets:
            listener.listen(_BACKLOG)  # asyncio's own backlog also limits how many it accepts at once
        threading.Thread(target=self._watch_workers, name="worker-watch", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._warm_up(), self._loop).result()
        self._warm = True
        self._on_ready(sockets[0].getsockname()[1])

    def _serve_http(self, sockets: list[socket.socket]) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            for client, end in zip(self._clients, self._worker_sockets, strict=True):
                await self._loop.create_unix_connection(lambda client=client: client, sock=end)  # type: ignore[misc]
            await self._uvicorn.serve(sockets)

        try:
            with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
                runner.run(run())
        finally:
            self._stop_requests.put(None)

    def _shut_down(self) -> None:
        """Takes no new connections, finishes running requests, refuses waiting ones, and then ends the workers."""
        self._stopping.set()
        if self._http_thread is not None:
            if self._http_thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop_accepting)
            self._uvicorn.should_exit = True
            self._http_thread.join(_GRACE_S + 5.0)
        for worker_socket in self._worker_sockets:
            worker_socket.close()
        for process in self._processes:
            process.join(_WORKER_EXIT_S if self._warm else 0.0)
            if process.is_alive():  # workers ignore SIGTERM, see `end_with_parent`
                process.kill()
                process.join()

    def _stop_accepting(self) -> None:
        self._connections.close()
        self._on_stop(self._refusal)
        self._loop.call_later(_GRACE_S, self._fail_all, self._refusal)

    def _refusal(self) -> ApiError:
        self._refused += 1
        return shutting_down()

    def _fail_all(self, reason: Callable[[], ApiError]) -> None:
        for client in self._clients:
            client.fail_all(reason)

    # --- workers ----------------------------------------------------------------------------------------------------

    def _watch_workers(self) -> None:
        closed = wait([process.sentinel for process in self._processes])
        if self._stopping.is_set():
            return
        self._worker_lost = True
        gone = next(process for process in self._processes if process.sentinel in closed)
        gone.join(5.0)  # its pipe closes shortly before the process has ended
        log.error("worker process %s ended with code %s; the server ends too.", gone.pid, gone.exitcode)
        self._loop.call_soon_threadsafe(self._fail_all, worker_lost)
        time.sleep(_LOST_WORKER_S)
        self.stop()


def bind(addresses: Sequence[tuple[socket.AddressFamily, tuple[str, int]]]) -> list[socket.socket]:
    """One bound socket per address, not listening yet; port 0 becomes one free port for all of them.

    Raises:
        ValueError: the port is taken or not allowed.
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
    """True for a process that is stopped by a signal or a debugger, or has ended."""
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return True
    return state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
