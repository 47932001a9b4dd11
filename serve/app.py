"""Putting the server together: two workers, the routes in front of them, and how it starts and ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Collection
from typing import Any

from fastapi import Request, Response

from grpo_pl.rewards.base import needs_of
from serve.completions import CompletionRoutes
from serve.dispatch import Generator, Scorer
from serve.errors import ApiError, install_handlers, json_response
from serve.evaluation import EvaluateRoute
from serve.generate_worker import GenerateAPI
from serve.guard import Guard
from serve.metrics import ServerMetrics
from serve.page import page
from serve.prompts import Prompts
from serve.reward_list import build_rewards
from serve.score_worker import ScoreAPI
from serve.scoring import ScoreRoute
from serve.served import ServedModel, find_model
from serve.server import Server, WorkerFailed
from serve.settings import ServeSettings
from serve.spec import RouteSpec

CHAT, COMPLETIONS, SCORE, EVALUATE = "/v1/chat/completions", "/v1/completions", "/v1/score", "/v1/evaluate"
ROUTES = {
    f"POST {CHAT}": "OpenAI chat, streaming and not",
    f"POST {COMPLETIONS}": "the same for plain prompts",
    f"POST {SCORE}": "the checkpoint's rewards over given completions",
    f"POST {EVALUATE}": "generate, score, pass@k and maj@k with intervals",
    "GET /v1/models": "the model's name",
    "GET /health": "the process is alive (no key needed)",
    "GET /ready": "requests are taken",
    "GET /metrics": "Prometheus metrics",
    "GET /": "a page to try it out",
}


class Application:
    """The front process: all routes and what they share."""

    def __init__(
        self, settings: ServeSettings, model: ServedModel, *, needs: Collection[str] = (), began: float
    ) -> None:
        self._settings, self._model, self._needs, self._began = settings, model, needs, began
        self.metrics = ServerMetrics([route.split()[1] for route in ROUTES])
        self.generator = Generator(CHAT, max_batch_size=settings.max_batch_size, max_queue=settings.max_queue)
        self.scorer = Scorer(SCORE, max_queue=settings.max_queue)
        self._lines = [self.generator.line, self.scorer.line]
        self.server = Server(self._worker_apis(), on_ready=self._say_ready, on_lost=self._lose_worker)
        for line in self._lines:
            line.connect(self.server)
        self._own_routes()

    def run(self) -> int:
        """Serves until told to stop; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            self.server.run(
                host=self._settings.host,
                port=self._settings.port,
                num_api_servers=1,
                log_level="warning",
                generate_client_file=False,
            )
        except WorkerFailed as error:
            print(f"serve: error: {error}", file=sys.stderr)
            return 1
        if self.server.worker_lost:
            print("serve: error: a worker process was lost. Start the server again.", file=sys.stderr)
            return 1
        return 0

    def _worker_apis(self) -> list[Any]:
        prompts, metrics, deadline_s = Prompts(self._model), self.metrics, self._settings.deadline_s
        completions = CompletionRoutes(
            generator=self.generator, prompts=prompts, metrics=metrics, deadline_s=deadline_s
        )
        evaluate = EvaluateRoute(
            generator=self.generator, scorer=self.scorer, prompts=prompts, metrics=metrics, deadline_s=deadline_s
        )
        score = ScoreRoute(
            model=self._model,
            needs=self._needs,
            scorer=self.scorer,
            metrics=metrics,
            deadline_s=deadline_s,
            max_queue=self._settings.max_queue,
        )
        chat_spec, score_spec = RouteSpec(CHAT), RouteSpec(SCORE)
        chat_spec.add_endpoint(CHAT, completions.chat, ["POST"])
        chat_spec.add_endpoint(COMPLETIONS, completions.completions, ["POST"])
        chat_spec.add_endpoint(EVALUATE, evaluate.evaluate, ["POST"])
        score_spec.add_endpoint(SCORE, score.score, ["POST"])
        device = choose_device(self._settings.device)
        return [
            GenerateAPI(self._model, device=device, max_batch_size=self._settings.max_batch_size, spec=chat_spec),
            ScoreAPI(self._model.rewards, spec=score_spec),
        ]

    def _own_routes(self) -> None:
        app = self.server.app
        litserves = {"/", "/health", "/info"}
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in litserves]
        handlers: dict[str, Callable[..., Any]] = {
            "/": page,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/v1/models": self._models,
        }
        for path, handler in handlers.items():
            app.add_api_route(path, handler, methods=["GET"])
        install_handlers(app)
        app.add_middleware(
            Guard,
            api_key=self._settings.api_key,
            max_body=self._settings.max_body_mb << 20,
            observe=self.metrics.observe,
        )

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if not self.server.ready:
            raise ApiError(503, "not ready: starting, stopping, or a worker was lost.", code="not_ready")
        return json_response({"status": "ready"})

    async def _models(self, request: Request) -> Response:
        entry = {"id": self._model.name, "object": "model", "created": int(self._began), "owned_by": "grpo_pl"}
        limits = {"context_length": self._model.context, "max_completion_length": self._model.max_completion_length}
        return json_response({"object": "list", "data": [{**entry, **limits}]})

    async def _metrics(self, request: Request) -> Response:
        places = self.generator.places
        self.metrics.running.set(places.size - places.free)
        self.metrics.waiting.set(places.waiting)
        self.metrics.open.set(len(self.server.response_buffer))
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _lose_worker(self) -> None:
        for line in self._lines:
            line.fail_all()

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if getattr(self.server, "_shutdown_event", None) is None:
            raise KeyboardInterrupt
        self.server.stop()

    def _say_ready(self) -> None:
        host = "127.0.0.1" if self._settings.host == "0.0.0.0" else self._settings.host.replace("::", "[::1]")
        address = f"http://{host}:{self._settings.port}"
        key = ' -H "Authorization: Bearer $GRPO_PL_API_KEY"' if self._settings.api_key else ""
        message = {"model": self._model.name, "messages": [{"role": "user", "content": "347+285="}]}
        after = f"after {time.time() - self._began:.1f} s"
        lines = [
            f"{self._model.name} ({self._model.source}) is served at {address} {after}.",
            *(f"  {route:<27} {text}" for route, text in ROUTES.items()),
            f"curl {address}{CHAT}{key} -H 'Content-Type: application/json' -d '{json.dumps(message)}'",
        ]
        print("\n".join(lines), flush=True)


def choose_device(wanted: str) -> str:
    """``auto`` is the first GPU, or else the CPU.

    Raises:
        ValueError: a device that this machine does not have.
    """
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1 …, got {wanted!r}.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {wanted!r}: this machine has no usable GPU.")
    return wanted


def run_server(settings: ServeSettings) -> int:
    """Loads what the front process needs, starts the workers and serves; the exit status.

    Raises:
        ValueError: a model, reward or device that cannot be served.
    """
    began = time.time()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    model = find_model(settings.model)
    rewards = build_rewards(model.rewards)  # a mistake shows here, as one line
    needs = needs_of(rewards)
    for reward in rewards:
        reward.close()
    sys.set_int_max_str_digits(640)  # a body may hold thousands of long numbers, which cost the square of their length
    return Application(settings, model, needs=needs, began=began).run()
