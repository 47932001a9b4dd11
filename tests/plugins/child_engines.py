"""Engines in a child process that run without vLLM: the native engine there, and some that end badly."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from grpo_pl.rollout.child.model_spec import ModelSpec
from grpo_pl.rollout.native.child import NativeChildEngine, NativeWorker
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


@dataclass(kw_only=True)
class StartingEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Starting"


@dataclass(kw_only=True)
class LoadingEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Loading"


@dataclass(kw_only=True)
class DeafEngine(NativeInChild):
    worker: ClassVar[str] = "light_workers:Deaf"


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


class Keeping(SlowNativeWorker):
    """Takes the first weights that it gets, and says nothing when it drops the others."""

    loads = 0

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        Keeping.loads += 1
        if Keeping.loads == 1:
            super().load(weights)


@dataclass(kw_only=True)
class KeepingEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:Keeping"


class FailingLate(SlowNativeWorker):
    """Cannot draw the rollout of the fifth step."""

    def generate(self, request: GenerateRequest, **told: Any) -> Rollout:
        if request.keys[0][0].step == 4:
            raise ValueError("the prompt of 99 tokens leaves no room")
        return super().generate(request, **told)


@dataclass(kw_only=True)
class FailingLateEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:FailingLate"


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


@dataclass(kw_only=True)
class DyingOnceEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:DyingOnce"


class DyingOnRankOne(SlowNativeWorker):
    """Ends in the middle of the first rollout for which there is no file yet, on one rank only."""

    def generate(self, request: GenerateRequest, **told: Any) -> Rollout:
        mark = Path(os.environ["MARK"])
        if os.environ.get("RANK") == "1" and not mark.exists():
            mark.touch()
            os._exit(9)
        return super().generate(request, **told)


@dataclass(kw_only=True)
class DyingOnRankOneEngine(NativeInChild):
    worker: ClassVar[str] = "child_engines:DyingOnRankOne"


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
