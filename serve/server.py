"""``PolicyServer``: the LitServer of ``grpo-pl serve``, with a trained policy, its rewards, and evaluation."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import socket
import string
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import litserve
from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from litserve.utils import WorkerSetupStatus

from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.extras.report.page import whole_page
from grpo_pl.policy.loading import choose_device
from grpo_pl.policy.trained import ServedModel
from grpo_pl.processes import resource_limits
from grpo_pl.processes.malloc import give_back_memory, share_arenas
from grpo_pl.processes.variables import reduced_to
from serve.calls import Deadline
from serve.completions import CHAT
from serve.errors import ApiError, check_model, install_handlers, json_response
from serve.evaluation import EvaluateRoute
from serve.follow import first_checkpoint
from serve.messages import Draw
from serve.middleware import middlewares
from serve.policy import PolicyAPI
from serve.rewards import RewardAPI
from serve.schemas import ChatRequest, EvaluateRequest
from serve.scoring import group_objective
from serve.settings import ServeSettings
from serve.worker import WorkerAPI, served_model

log = logging.getLogger(__name__)

_GRACE_S = 30  # for requests in flight, after SIGTERM
_LOST_S = 1.0  # between the loss of a worker and the end of the server, so that probes and clients notice it
_GIVE_BACK_S = 10.0  # between two returns of freed memory to the system
_CONNECTIONS = 1024  # or fewer, where the limit on open files is lower
_RESERVE = 64  # descriptors for everything but connections
_WARM_UP_CHARS = 16
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HTML, _CSS, _JS = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
_PAGE = whole_page(_HTML, title="grpo_pl", style=_CSS, script=_JS)
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class PolicyServer(litserve.LitServer):
    """Serves a trained policy and its rewards.

    Args:
        settings: the options of ``grpo-pl serve``.

    Raises:
        ValueError: there is no model, or it cannot be served.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.began = settings, time.time()
        path = settings.model if settings.follow is None else first_checkpoint(settings.follow)
        assert path is not None  # the settings are checked
        model = served_model(path, trust_rewards=settings.trust_rewards)
        if settings.served_model_name is not None:
            model = replace(model, name=settings.served_model_name)
        default_mb = 16 if model.policy.images else 8
        self._body_mb = settings.max_body_mb or default_mb
        _ = model.tools, model.tokenizer  # mistakes show here
        limits: dict[str, Any] = {"max_queue": settings.max_queue, "deadline": settings.deadline}
        follow = settings.follow is not None
        self.policy_api = PolicyAPI(model, max_completions=settings.max_batch_size, follow=follow, **limits)
        self.reward_api = RewardAPI(model, **limits)
        self.policy, self.rewards = self.policy_api.spec, self.reward_api.spec
        self.metrics = self.rewards.metrics = self.policy.metrics
        self.policy.add_route("/v1/evaluate", EvaluateRequest, EvaluateRoute(self.policy, self.rewards).evaluate)
        self.model: ServedModel = model
        self._objective = group_objective(model.algorithm).trained or None
        self._warm = False
        self._lost = multiprocessing.RawValue(ctypes.c_bool, False)  # set by the HTTP process, read by the first one
        kind, _, number = choose_device(settings.device).partition(":")
        super().__init__(
            [self.policy_api, self.reward_api],
            accelerator=kind,  # type: ignore[arg-type]
            devices=[int(number)] if number else 1,  # type: ignore[arg-type]
            timeout=False,
            middlewares=middlewares(settings, self.metrics.observe, self._body_mb),
            disable_openapi_url=True,
        )
        self.uvicorn_graceful_timeout = _GRACE_S
        self.monitor_internal = 3600  # this server watches its workers itself
        self._add_routes()

    def setup_auth(self, lit_api: Any = None) -> Any:
        """The key of all routes is asked for in the middleware."""
        return _nothing

    def _add_routes(self) -> None:
        routes = self.app.router.routes
        routes[:] = [route for route in routes if getattr(route, "path", "") != "/"]  # LitServe's own page
        self.app.get("/v1/models")(self._models)
        self.app.get("/v1/models/{id:path}")(self._one_model)
        self.app.get("/ready")(self._ready)
        self.app.get("/metrics")(self._metrics)
        self.app.get("/")(self._page)
        install_handlers(self.app)

    # --- routes -----------------------------------------------------------------------------------------------------

    async def _ready(self) -> Response:
        if not self._warm or not (self.policy.is_alive and self.rewards.is_alive):
            raise ApiError(503, "not ready: starting, stopping, or a worker was lost.", code="not_ready")
        told = {"status": "ready", "weights": self.policy.version}
        return json_response(told | ({"error": self.policy.not_followed} if self.policy.not_followed else {}))

    async def _models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def _one_model(self, id: str) -> Response:
        check_model(id, self.model.name)
        return json_response(self._model_entry())

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": int(self.began),
            "owned_by": "grpo_pl",
            "context_length": self.model.context,
            "max_model_len": self.model.context,  # as vLLM names it
            "max_completion_length": self.model.sampling.max_completion_length,
            "temperature": self.model.sampling.temperature,
            "objective": self._objective,
            "example": next(iter(self.model.examples), None),
            **({"examples": list(self.model.examples)} if len(self.model.examples) > 1 else {}),
            **({"images": ImageLimits().numbers | {"max_body_mb": self._body_mb}} if self.model.policy.images else {}),
        }

    async def _page(self) -> Response:
        """The page to try the policy out, which may load nothing from elsewhere."""
        headers = {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer"}
        return Response(_PAGE, media_type="text/html; charset=utf-8", headers=headers)

    async def _metrics(self) -> Response:
        self.metrics.running.set(self.policy.running)
        self.metrics.waiting.set(self.policy.waiting)
        self.metrics.open.set(len(self.policy.calls) + len(self.rewards.calls))
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    # --- start and end ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serves until a signal tells it to stop.

        Raises:
            ValueError: the port is taken, or a worker did not start for a reason that its user can put right.
            ChildProcessError: a worker did not start or was lost.
        """
        for number in _STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` sets it
                signal.signal(number, _stop)
        os.register_at_fork(after_in_child=_signals_of_a_fork)
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with _bound(self.settings) as listener:
            self._listener = listener
            try:
                self.run(
                    port=8000,  # of no effect beside a socket that is bound already
                    num_api_servers=1,
                    log_level="warning",
                    generate_client_file=False,
                    fd=listener.fileno(),
                    http=self.settings.http,
                    ws="none",
                    access_log=False,
                    server_header=False,
                    limit_concurrency=max(16, min(_CONNECTIONS, open_files - _RESERVE)),
                    ssl_certfile=self.settings.ssl_certfile,
                    ssl_keyfile=self.settings.ssl_keyfile,
                )
            finally:
                self._end_all()
        if self._lost.value:
            raise ChildProcessError("a worker process was lost. Start the server again.")

    def launch_inference_worker(self, lit_api: WorkerAPI) -> list[Any]:
        """Starts a worker with the listed variables only."""
        lit_api.share_complaint()
        with reduced_to(lit_api.environment()):
            return list(super().launch_inference_worker(lit_api))

    def verify_worker_status(self) -> None:
        """Waits until all workers are ready, or tells why one did not start."""
        while any(status != WorkerSetupStatus.READY for status in self.workers_setup_status.values()):
            failed = not all(worker.is_alive() for worker in self.inference_workers)
            for lit_api in (self.policy_api, self.reward_api):
                if complaint := lit_api.complaint.value.decode(errors="ignore"):
                    raise ValueError(complaint)
            if failed:
                raise ChildProcessError("a worker could not start; its message is above.")
            time.sleep(0.02)

    def _end_all(self) -> None:
        """Ends what LitServe leaves behind where the start failed."""
        for child in multiprocessing.active_children():  # for which the end of this process would wait
            if "Manager" not in child.name:
                child.kill()  # before the queues, of whose loss it would tell in a traceback
        if self.transport_config.manager is not None:
            self.transport_config.manager.shutdown()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """In the HTTP process: watches the workers, and says when the server is ready."""
        parent, loop = os.getppid(), asyncio.get_running_loop()
        resource_limits.end_with_parent(parent)  # it would answer on if the first process were killed
        sys.setswitchinterval(0.001)  # the event loop runs sooner while threads read large bodies
        # not uvicorn's two lines about each request that offers HTTP/2, which advise to install WebSockets
        logging.getLogger("uvicorn.error").addFilter(lambda r: "upgrade" not in r.msg and "WebSocket" not in r.msg)

        def lose(sentinel: int) -> None:
            loop.remove_reader(sentinel)
            log.error("a worker process ended; the server ends too.")
            self._lost.value = True
            for spec in (self.policy, self.rewards):
                spec.lose()
            loop.call_later(_LOST_S, os.kill, parent, signal.SIGTERM)

        async with super().lifespan(app):
            for worker in self.inference_workers:
                loop.add_reader(worker.sentinel, lose, worker.sentinel)
            tasks = [asyncio.create_task(self._begin()), asyncio.create_task(_give_back_memory())]
            yield
            self._warm = False
            for task in tasks:
                task.cancel()

    async def _begin(self) -> None:
        """Draws a first completion, because libraries load many modules on first use, and says where the server is."""
        printable = string.printable.split()[0]
        text = "".join(filter(self.policy.prompts.known(printable).__contains__, printable))[:_WARM_UP_CHARS]
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": text}], "max_tokens": 2, "seed": 0})
        try:
            prompt = await self.policy.prompts.from_messages(body.messages)
            part = self.policy.prompts.part(prompt, body, None, seed=0, templated=True)
            with self.policy.draw(Draw([part]), deadline=Deadline(self.settings.deadline), live=False) as call:
                async for _ in call:
                    pass
        except ApiError as error:
            log.warning("a first chat failed: %s", error.message)
        gc.collect()
        gc.freeze()  # the garbage collector stops everything for a third of a second to look at what imports have made
        while not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            await asyncio.sleep(0.01)
        self._warm = True
        self._say_ready(self._listener.getsockname()[1])

    def _say_ready(self, port: int) -> None:
        settings, model = self.settings, self.model
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        scheme = "http" if settings.ssl_certfile is None else "https"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        key = ' -H "Authorization: Bearer $GRPO_PL_API_KEY"' if settings.api_key else ""
        problem = model.examples[0]["problem"] if model.examples else "1+1="
        message = {"model": model.name, "messages": [{"role": "user", "content": problem}]}
        lines = [
            f"{model.name} ({model.source}) is served at {address} after {time.time() - self.began:.1f} s.",
            *(f"  {' '.join([*(r.methods or ()), r.path])}" for r in self.app.routes if isinstance(r, APIRoute)),
            f"curl {address}{CHAT}{key} -H 'Content-Type: application/json' -d '{json.dumps(message)}'",
        ]
        print("\n".join(lines), flush=True)


async def _nothing() -> None:
    """Asks for nothing."""


async def _give_back_memory() -> None:
    """Returns to the system every few seconds what large bodies took."""
    while True:
        await asyncio.sleep(_GIVE_BACK_S)
        await asyncio.to_thread(give_back_memory)


def _stop(number: int, frame: Any) -> None:
    """Ends ``LitServer.run`` as Ctrl-C does; what follows is not interrupted."""
    for each in _STOPPING:
        signal.signal(each, lambda *_: None)  # SIG_IGN would complain of signals that have come already
    raise KeyboardInterrupt


def _signals_of_a_fork() -> None:
    """Until a forked process sets its own handlers, signals end it, but for that of a terminal that closes: all get it,
    and the first process ends the others."""
    if signal.getsignal(signal.SIGTERM) is _stop:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def _bound(settings: ServeSettings) -> Iterator[socket.socket]:
    """A socket bound to the first address of the host, not listening yet: LitServe itself takes three hosts, and no
    port below 1024.

    Raises:
        ValueError: the port is taken or not allowed.
    """
    family, address = settings.addresses[0]
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        try:
            listener.bind(address)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"cannot listen on {address[0]}, port {address[1]}: {reason}. Choose another.") from None
        yield listener


def run_server(settings: ServeSettings) -> None:
    """Serves as ``settings`` say."""
    share_arenas()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    PolicyServer(settings).serve()
