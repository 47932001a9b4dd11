"""Engines in a child process that run without vLLM: the native engine there, and some that end badly."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_pl.rollout.child.engine import ChildEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import Rollout


class NativeWorker:
    """Draws with the native engine; takes ``pause_s`` between tokens."""

    def __init__(self, *, config: dict[str, Any], pause_s: float) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        self.pause_s = pause_s

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        missing, unexpected = self.model.load_state_dict(dict(weights), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)

    def generate(self, *, should_stop: Callable[[], bool], **request: Any) -> Rollout:
        def slowly() -> bool:
            time.sleep(self.pause_s)
            return should_stop()

        return NativeEngine().generate(self.model, should_stop=slowly, **request)


@dataclass(kw_only=True)
class NativeInChild(ChildEngine):
    worker: ClassVar[str] = "child_engines:NativeWorker"
    pause_s: float = 0.0

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return {"config": model.config.to_dict(), "pause_s": self.pause_s}


@dataclass(kw_only=True)
class RefusingEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Refusing"


@dataclass(kw_only=True)
class FailingEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Failing"


@dataclass(kw_only=True)
class CutEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Cut"


@dataclass(kw_only=True)
class SurvivedEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Survived"


@dataclass(kw_only=True)
class DyingEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Dying"


@dataclass(kw_only=True)
class ForgettingEngine(NativeInChild):
    """Hears of no update."""

    def update_weights(self, model: PreTrainedModel) -> None:
        pass


class Keeping(NativeWorker):
    """Takes the first weights that it gets, and says nothing when it drops the others."""

    loads = 0

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        Keeping.loads += 1
        if Keeping.loads == 1:
            super().load(weights)


@dataclass(kw_only=True)
class KeepingEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:Keeping"


class DyingOnRankOne(NativeWorker):
    """Ends in the middle of the first rollout for which there is no file yet, on one rank only."""

    def generate(self, **request: Any) -> Rollout:
        mark = Path(os.environ["MARK"])
        if os.environ.get("RANK") == "1" and not mark.exists():
            mark.touch()
            os._exit(9)
        return super().generate(**request)


@dataclass(kw_only=True)
class DyingOnRankOneEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:DyingOnRankOne"
