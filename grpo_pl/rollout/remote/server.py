"""Runs an engine's HTTP server until a signal ends it, and the engine's process with it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from grpo_pl.rollout.child.engine import ChildEngine
from grpo_pl.rollout.remote.routes import EngineRoutes
from grpo_pl.rollout.remote.settings import ServerSettings

_BACKLOG = 1024  # connections that the kernel holds until they are accepted
_ENDS_WITHIN_S = 3
"""For requests that are under way when the server is told to end."""


class _Uvicorn(uvicorn.Server):
    """Stops as we say, not by its own handlers of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(engine: ChildEngine, settings: ServerSettings, *, protocol: Any, accepted_at_once: int) -> None:
    """Serves until SIGTERM or Ctrl-C, and takes the worker's process along.

    Args:
        protocol: makes uvicorn's protocol for each connection; it bounds what those without the token can take up.
        accepted_at_once: connections that are accepted before others are looked at.

    Raises:
        ValueError: the port is taken, or the certificate cannot be used.
    """
    import transformers.models.auto  # noqa: F401 - not while clients wait

    served = EngineRoutes(engine, settings)
    config = uvicorn.Config(
        served.app,
        http=protocol,
        ws="none",
        backlog=accepted_at_once,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_ENDS_WITHIN_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:
        raise ValueError(f"no certificate with its key in {settings.ssl_certfile}: {error}.") from None
    http = _Uvicorn(config)

    def stop(number: int, frame: Any) -> None:
        http.should_exit = True
        served.seat.end()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
            signal.signal(number, stop)
    try:
        asyncio.run(_serve(http, settings, partial(_say_ready, engine, settings)))
    finally:
        served.seat.end()


async def _serve(http: uvicorn.Server, settings: ServerSettings, say_ready: Callable[[int], None]) -> None:
    family, kind, _, _, address = socket.getaddrinfo(
        settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {settings.host}, port {settings.port}: {error.strerror}.") from None
    serving = asyncio.create_task(http.serve([listener]))
    while not http.started and not serving.done():
        await asyncio.sleep(0.01)
    if http.started:
        listener.listen(_BACKLOG)  # asyncio's own backlog also limits how many it accepts at once
        say_ready(listener.getsockname()[1])
    await serving


def _say_ready(engine: ChildEngine, settings: ServerSettings, port: int) -> None:
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host or "0.0.0.0"
    token = "with the token" if settings.token else "without a token, for this machine alone"
    print(f"{type(engine).__name__} serves at {scheme}://{host}:{port}, {token}.", flush=True)
