"""Engines in a child process that run without vLLM: the native engine there, and some that end badly."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from grpo_pl.extras.engines.copy_engine import ModelSpec
from grpo_pl.extras.engines.native_child import NativeChildEngine, NativeWorker
from grpo_pl.types import GenerateRequest, Rollout


class SlowNativeWorker(NativeWorker):
    """Takes ``pause_s`` between tokens."""

    def __init__(self, *, pause_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.pause_s = pause_s

    def generate(self, request: GenerateRequest, *, should_stop: Callable[[], bool], **told: Any) -> Rollout:
        def slowly() -> bool:
            time.sleep(self.pause_s)
            return should_stop()

        return super().generate(request, should_stop=slowly, **told)


@dataclass(kw_only=True)
class NativeInChild(NativeChildEngine):
    worker: ClassVar[str] = "child_engines:SlowNativeWorker"
    pause_s: float = 0.0

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        return {**super().settings(policy), "pause_s": self.pause_s}


def _running(name: str, worker: str) -> type[NativeInChild]:
    """An engine in whose process that worker draws."""
    return type(name, (NativeInChild,), {"worker": worker, "__module__": __name__})


StartingEngine = _running("StartingEngine", "light_workers:Starting")
LoadingEngine = _running("LoadingEngine", "light_workers:Loading")
DeafEngine = _running("DeafEngine", "light_workers:Deaf")
RefusingEngine = _running("RefusingEngine", "light_workers:Refusing")
FailingEngine = _running("FailingEngine", "light_workers:Failing")
CutEngine = _running("CutEngine", "light_workers:Cut")
SurvivedEngine = _running("SurvivedEngine", "light_workers:Survived")
DyingEngine = _running("DyingEngine", "light_workers:Dying")
KeepingEngine = _running("KeepingEngine", "child_engines:Keeping")
FailingLateEngine = _running("FailingLateEngine", "child_engines:FailingLate")
DyingOnceEngine = _running("DyingOnceEngine", "child_engines:DyingOnce")
DyingOnRankOneEngine = _running("DyingOnRankOneEngine", "child_engines:DyingOnRankOne")


@dataclass(kw_only=True)
class ForgettingEngine(NativeInChild):
    """Hears of no update."""

    def update_weights(self, model: PreTrainedModel) -> None:
        pass


class Keeping(SlowNativeWorker):
    """Takes the first weights that it gets, and says nothing when it drops the others."""

    loads = 0

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        Keeping.loads += 1
        if Keeping.loads == 1:
            super().load(weights)


class FailingLate(SlowNativeWorker):
    """Cannot draw the rollout of the fifth step."""

    def generate(self, request: GenerateRequest, **told: Any) -> Rollout:
        if request.keys[0][0].step == 4:
            raise ValueError("the prompt of 99 tokens leaves no room")
        return super().generate(request, **told)


class DyingOnce(SlowNativeWorker):
    """Ends once in the middle of the rollout of each step that ``DIES_AT`` names, and leaves a file in ``MARKS``."""

    def generate(self, request: GenerateRequest, *, should_stop: Callable[[], bool], **told: Any) -> Rollout:
        step = str(request.keys[0][0].step)
        mark, tokens = Path(os.environ["MARKS"], step), iter(range(3 + int(step) % 7))
        doomed = request.keys[0][0].split == "train" and step in os.environ["DIES_AT"].split()

        def dies() -> bool:
            if doomed and next(tokens, None) is None and not mark.exists():
                mark.touch()
                os._exit(9)
            return should_stop()

        return super().generate(request, should_stop=dies, **told)


class DyingOnRankOne(SlowNativeWorker):
    """Ends in the middle of the first rollout for which there is no file yet, on one rank only."""

    def generate(self, request: GenerateRequest, **told: Any) -> Rollout:
        mark = Path(os.environ["MARK"])
        if os.environ.get("RANK") == "1" and not mark.exists():
            mark.touch()
            os._exit(9)
        return super().generate(request, **told)


@dataclass(kw_only=True)
class StuckEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Stuck"
    where: str = ""

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        return {**super().settings(policy), "where": self.where}


class SlowLoading(SlowNativeWorker):
    """Takes 50 times ``pause_s`` for its weights, and leaves a file named after its process in ``marks`` before."""

    def __init__(self, *, marks: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.marks = marks

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        Path(self.marks, str(os.getpid())).touch()
        time.sleep(50 * self.pause_s)
        super().load(weights)


@dataclass(kw_only=True)
class SlowLoadingEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:SlowLoading"
    marks: str = ""

    def settings(self, policy: ModelSpec) -> dict[str, Any]:
        return {**super().settings(policy), "marks": self.marks}
