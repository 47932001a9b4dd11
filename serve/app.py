"""Builds the server from two workers and the routes in front of them, and runs it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import string
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import httpx2
from fastapi import FastAPI, Response

from grpo_pl.policy.loading import choose_device
from grpo_pl.policy.trained import ServedModel, find_model, without_link
from grpo_pl.processes.malloc import give_back_memory, share_arenas
from serve.completions import CompletionRoutes
from serve.errors import ApiError, check_model, install_handlers, json_response
from serve.evaluation import EvaluateRoute
from serve.generate_worker import GenerateWorker
from serve.generator import Generator
from serve.grammars import GrammarChecker
from serve.large_json import JsonRoute
from serve.litserve_adapter import WorkerProcess
from serve.logs import configure_logs, open_access_log, write_output
from serve.metrics import ServerMetrics
from serve.middleware import CrossOrigin, Guard
from serve.pages import docs, openapi, page
from serve.prompts import Prompts, TokenRoutes
from serve.responses import ResponsesRoute
from serve.score_worker import ScoreWorker
from serve.scoring import Scorer, ScoreRoute, group_objective, needed_columns
from serve.server import Server, bind
from serve.settings import ServeSettings
from serve.weights import WEIGHTS, Follower, Weights, WeightsRoutes, first_checkpoint, run_of

log = logging.getLogger(__name__)

CHAT, SCORE = "/v1/chat/completions", "/v1/score"
_WARM_UP_CHARS = 16
_GIVE_BACK_S = 10.0  # between two returns of freed memory to the system


Route = tuple[str, str, Callable[..., Any], str]
"""Method, path, handler and summary."""


class Application:
    """The front process: all routes, and the objects that they share."""

    def __init__(self, settings: ServeSettings, model: ServedModel, *, needs: Collection[str], began: float) -> None:
        self._settings, self._model, self._needs, self._began = settings, model, needs, began
        self.metrics = ServerMetrics()
        self.generator = Generator(max_batch_size=settings.max_batch_size, max_queue=settings.max_queue)
        self.scorer = Scorer(max_queue=settings.max_queue)
        self.weights = Weights(self.generator, model)
        self.grammars = GrammarChecker(model.tokenizer, max_queue=settings.max_queue)
        self._prompts = Prompts(model)
        generate = GenerateWorker(model, device=choose_device(settings.device), max_batch_size=settings.max_batch_size)
        score = ScoreWorker(model.rewards, trust_rewards=model.trust_rewards)
        self._sockets = bind(settings.addresses)
        self.server = Server(
            [
                (WorkerProcess("generate", generate), self.generator),
                (WorkerProcess("score", score), self.scorer),
            ],
            warm_up=self._warm_up,
            on_ready=self._say_ready,
            on_stop=self.generator.slots.close,
        )
        self._routes = self._all_routes()
        self._set_up(self.server.app)

    def run(self) -> None:
        """Serves until a signal tells it to stop; raises as ``Server.serve`` does."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
                signal.signal(number, lambda number, frame: self.server.stop())
        try:
            self.server.serve(self._sockets, **self._settings.tls)
        finally:
            self.grammars.close()

    def _all_routes(self) -> list[Route]:
        prompts = self._prompts
        shared: dict[str, Any] = {"metrics": self.metrics, "deadline_s": self._settings.deadline}
        drawing: dict[str, Any] = {"generator": self.generator, "weights": self.weights, "prompts": prompts, **shared}
        completions = CompletionRoutes(grammars=self.grammars, **drawing)
        responses = ResponsesRoute(completions, self._model.name)
        tokens, weights = TokenRoutes(prompts), WeightsRoutes(self.weights)
        score = ScoreRoute(
            model=self._model, needs=self._needs, scorer=self.scorer, max_queue=self._settings.max_queue, **shared
        )
        evaluate = EvaluateRoute(scorer=self.scorer, **drawing)
        return [
            ("POST", CHAT, completions.chat, "OpenAI chat, streaming and not"),
            ("POST", "/v1/completions", completions.completions, "the same for plain prompts"),
            ("POST", "/v1/responses", responses.responses, "OpenAI's newer API, text and functions"),
            ("POST", "/tokenize", tokens.tokenize, "text or messages to token ids"),
            ("POST", "/detokenize", tokens.detokenize, "token ids to text"),
            ("POST", SCORE, score.score, "the checkpoint's rewards over given completions"),
            ("POST", "/v1/evaluate", evaluate.evaluate, "generate, score, pass@k and maj@k with intervals"),
            ("GET", WEIGHTS, weights.tell, "which version of the weights answers"),
            ("POST", WEIGHTS, weights.change, "take newer ones (a key of its own)"),
            ("GET", "/v1/models", self._models, "the model's name"),
            ("GET", "/v1/models/{id:path}", self._one_model, "the same for one"),
            ("GET", "/health", self._health, "the process is alive (no key needed)"),
            ("GET", "/ready", self._ready, "requests are taken"),
            ("GET", "/metrics", self._metrics, "Prometheus metrics"),
            ("GET", "/", page, "a page to try it out"),
            ("GET", "/docs", docs, "what the routes take"),
            ("GET", "/openapi.json", openapi, "the same for programs"),
        ]

    def _set_up(self, app: FastAPI) -> None:
        """The routes, and the guard around them."""
        app.router.route_class = JsonRoute
        for method, path, handler, summary in self._routes:
            app.add_api_route(path, handler, methods=[method], summary=summary)
        install_handlers(app)
        settings, port = self._settings, self._sockets[0].getsockname()[1]
        app.add_middleware(Guard, settings=settings, port=port, observe=self.metrics.observe)
        if settings.cors_origins:
            app.add_middleware(
                CrossOrigin,
                allow_origins=[origin.lower() for origin in settings.cors_origins],
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
                expose_headers=["X-Request-ID", "Retry-After"],
            )

    async def _health(self) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self) -> Response:
        if not self.server.ready:
            raise ApiError(503, "not ready: starting, stopping, or a worker was lost.", code="not_ready")
        return json_response({"status": "ready"})

    async def _models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def _one_model(self, id: str) -> Response:
        check_model(id, self._model.name)
        return json_response(self._model_entry())

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": int(self._began),
            "owned_by": "grpo_pl",
            "context_length": self._model.context,
            "max_model_len": self._model.context,  # vLLM's name
            "max_completion_length": self._model.sampling.max_completion_length,
            "temperature": self._model.sampling.temperature,
            "objective": group_objective(self._model.algorithm).trained or None,
            "example": next(iter(self._model.examples), None),
        }

    async def _metrics(self) -> Response:
        slots = self.generator.slots
        self.metrics.running.set(slots.size - slots.free)
        self.metrics.waiting.set(slots.waiting)
        self.metrics.versions.set(len(self.weights.held))
        self.metrics.open.set(len(self.generator.calls) + len(self.scorer.calls))
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _warm_up(self) -> None:
        """Sends chats through all layers, because libraries load many modules on first use, for which the first client
        would have to wait; starts the processes that check grammars."""
        printable = string.printable.split()[0]
        text = "".join(filter(self._prompts.known(printable).__contains__, printable))
        chat = {"messages": [{"role": "user", "content": text[:_WARM_UP_CHARS]}], "max_tokens": 2, "seed": 0}
        key = self._settings.api_key
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(self.server.app),  # all layers but the HTTP connection
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=None,
        ) as client:
            for stream in (False, True):
                for count in (1, min(8, self.generator.slots.size)):
                    answer = await client.post(CHAT, json={**chat, "n": count, "stream": stream})
                    if answer.is_error:
                        log.warning("a first chat failed with %d: %s", answer.status_code, answer.text[:200])
        await self.grammars.start()
        self.server.app.openapi()  # which is kept
        gc.collect()
        gc.freeze()  # the garbage collector stops everything for a third of a second to look at what imports have made
        self.metrics.reset()
        if self._settings.access_log:
            open_access_log()
        self._giving_back = asyncio.create_task(_give_back_memory())  # ends with the event loop, as the other does
        run = run_of(self._model)
        if self._settings.follow is not None and run is not None:
            self._following = asyncio.create_task(Follower(self.weights, run).follow())  # ends with the event loop

    def _say_ready(self, port: int) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        key = ' -H "Authorization: Bearer $GRPO_PL_API_KEY"' if self._settings.api_key else ""
        problem = self._model.examples[0]["problem"] if self._model.examples else "1+1="
        message = {"model": self._model.name, "messages": [{"role": "user", "content": problem}]}
        after = f"after {time.time() - self._began:.1f} s"
        lines = [
            f"{self._model.name} ({self._model.source}) is served at {address} {after}.",
            *(f"  {method + ' ' + path.replace(':path', ''):<27} {told}" for method, path, _, told in self._routes),
            f"curl {address}{CHAT}{key} -H 'Content-Type: application/json' -d '{json.dumps(message)}'",
        ]
        write_output("\n".join(lines))


async def _give_back_memory() -> None:
    """Returns to the system every few seconds what large bodies took."""
    while True:
        await asyncio.sleep(_GIVE_BACK_S)
        await asyncio.to_thread(give_back_memory)


def run_server(settings: ServeSettings) -> None:
    """Loads what the front process needs, starts the workers and serves."""
    began = time.time()
    share_arenas()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logs()
    path = settings.model if settings.follow is None else first_checkpoint(settings.follow)
    assert path is not None  # the settings are checked
    model = without_link(find_model(path, trust_rewards=settings.trust_rewards))
    if settings.served_model_name is not None:
        model = replace(model, name=settings.served_model_name)
    needs, _ = needed_columns(model), model.tools  # mistakes show here
    sys.setswitchinterval(0.001)  # the event loop runs sooner while threads parse large bodies
    Application(settings, model, needs=needs, began=began).run()
