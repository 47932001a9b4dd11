"""``Player``: a worker that draws completions, and plays episodes with environments beside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch

from grpo_pl.extras.agents.episodes import AnyRequest, EngineOutput, play_episodes
from grpo_pl.extras.agents.pool import EnvironmentPool
from grpo_pl.extras.engines.child.main import Worker
from grpo_pl.processes.modules import load_name
from grpo_pl.rollout.engine import ProgressFn, RolloutEngine, Watching
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Player:
    """Answers requests of both kinds.

    Args:
        worker: ``module:Class`` of a `Worker`.
        settings: its arguments.
    """

    def __init__(self, worker: str, settings: dict[str, Any]) -> None:
        self.worker: Worker = load_name(worker)(**settings)
        self._engine = _WorkerEngine(self.worker, max_batch_rows=settings.get("max_batch_rows", 0))
        self._pool: EnvironmentPool | None = None  # stays from one request to the next
        self._environment = b""  # that it plays

    def draw(self, request: AnyRequest, *, progress: ProgressFn, should_stop: Callable[[], bool]) -> EngineOutput:
        if isinstance(request, GenerateRequest):
            return self.worker.generate(request, progress=progress, should_stop=should_stop), []
        environment = pickle.dumps((request.environment, request.pool_limits))
        if self._pool is None or self._environment != environment:
            if self._pool is not None:
                self._pool.close()
            self._pool, self._environment = EnvironmentPool(request.environment, request.pool_limits), environment
        model, device = getattr(self.worker, "model", None), torch.device("cpu")
        watching = Watching(progress=progress, should_stop=should_stop)
        return play_episodes(request, self._engine, model, self._pool, device=device, **watching)


@dataclass
class _WorkerEngine(RolloutEngine):
    """A worker where an engine is expected."""

    worker: Worker
    max_batch_rows: int

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]) -> Rollout:
        progress, should_stop = watching.get("progress"), watching.get("should_stop")
        return self.worker.generate(
            request, progress=progress or (lambda *_: None), should_stop=should_stop or (lambda: False)
        )

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        engine = getattr(self.worker, "engine", None)  # of our own, which keeps keys and values between turns
        return self if engine is None else engine.continuing(model, rows=rows)
