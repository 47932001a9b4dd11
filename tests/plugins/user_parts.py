"""Parts that a user might bring along by ``class_path``; tests of whole runs name them in their configurations."""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.objective.custom import SurrogateObjective, TokenBatch
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import Problem, Rollout

SECRET = "DEMONSTRATED"
HEARD: list[tuple[list[str], list[str], dict[str, list[Any]]]] = []
"""Completions, answers and columns of every call of ``Listening``."""
SHOWN: list[str] = []
"""Demonstrations that ``Whispering`` gave."""


@dataclass(kw_only=True)
class Whispering(ArithmeticPrompts):
    """Its demonstrations can be told from anything that the policy writes by itself."""

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        SHOWN.append(f"<think>{SECRET}</think><answer>\\boxed{{{prompt.answer}}}</answer>")
        return SHOWN[-1]


@dataclass(kw_only=True)
class LateDate(ArithmeticPrompts):
    """The last prompt of the fourth step has what no checkpoint may hold."""

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        *others, last = super().prompts(step, attempt, count=count)
        return [*others, replace(last, columns={"day": date(2026, 1, 1)}) if step == 3 else last]


@dataclass(kw_only=True)
class Listening(Reward):
    """Remembers all it was told; 1 for an even number of characters."""

    name: str = "listening"
    weight: float = 1.0
    correctness: bool = False

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        HEARD.append((list(completions), list(answers), {name: list(column) for name, column in columns.items()}))
        return [Score(float(len(text) % 2 == 0), "ok") for text in completions]


@dataclass(kw_only=True)
class Failing(Listening):
    """Like ``Listening``, but raises in one of its calls, counted from 1 (of the process of ``rank``, or of all)."""

    name: str = "failing"
    on_error: Literal["raise", "none"] = "raise"
    call: int = 0
    rank: int | None = None
    calls: int = field(default=0, init=False)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        self.calls += 1
        if self.calls == self.call and self.rank in (None, int(os.environ.get("RANK", "0"))):
            raise RuntimeError("the service is down")
        return super().__call__(completions, answers, columns)


@dataclass(kw_only=True)
class Flickering(Reward):
    """Equal for all completions in one rollout, different in the next."""

    name: str = "flickering"
    weight: float = 1.0
    correctness: bool = False
    calls: int = field(default=0, init=False)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        self.calls += 1
        return [Score(float(self.calls % 2 * i % 2), "ok") for i in range(len(completions))]


class PoisonGradients(Callback):
    """Makes every gradient from some rollout on infinite, up to another."""

    def __init__(self, begin: int, end: int = 1000) -> None:
        self.rollouts = range(begin, end)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def poison(gradient: Tensor) -> Tensor:
            return gradient * float("inf") if trainer.datamodule.completed_rollouts in self.rollouts else gradient

        next(iter(pl_module.parameters())).register_hook(poison)


class PoisonWeights(Callback):
    """Makes a weight not a number before the rollout after ``rollouts`` completed ones."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts = rollouts

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.datamodule.completed_rollouts == self.rollouts:
            next(iter(pl_module.parameters())).data.fill_(float("nan"))


class Meddling(Callback):
    """Tries to go on with the run that it is part of, and prints what it is told."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from grpo_pl.files.runs import resume_run

        folder = Path(trainer.default_root_dir)
        try:
            resume_run(folder.parent, folder.name, "{}", first=True)
        except ValueError as error:
            print(error, file=sys.stderr)


class FillDisk(Callback):
    """Leaves no byte on the disk of ``folder`` from one number of completed rollouts to another."""

    def __init__(self, folder: str, first: int, last: int) -> None:
        self.file, self.first, self.last = Path(folder) / "filler", first, last

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        completed = trainer.datamodule.completed_rollouts
        self._fill(trainer)
        if completed == self.last:
            self.file.unlink(missing_ok=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fill(trainer)

    def _fill(self, trainer: Trainer) -> None:
        if trainer.datamodule.completed_rollouts == self.first and trainer.is_global_zero:
            with self.file.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))


class KeepSamples(Callback):
    """Appends what this process drew to ``samples<rank>.jsonl`` beside the run: one line per prompt with its texts."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples = outputs["experience"].samples
        size = samples.rollout.group_size
        with (Path(trainer.default_root_dir).parent / f"samples{trainer.global_rank}.jsonl").open("a") as lines:
            for i, prompt in enumerate(samples.prompts):
                texts = samples.completions[i * size : (i + 1) * size]
                lines.write(json.dumps([samples.step, prompt.question, texts]) + "\n")


EVENTS: list[str] = []
"""What ``Telling`` was asked for, in order."""


@dataclass(kw_only=True)
class Telling(PlainEngine):
    """Tells when it draws and when it hears of new weights."""

    def generate(self, *args: Any, **kwargs: Any) -> Rollout:
        EVENTS.append("draw")
        return super().generate(*args, **kwargs)

    def update_weights(self, model: Any) -> None:
        EVENTS.append("update")


@dataclass(kw_only=True)
class Slow(NativeEngine):
    """Takes its time between tokens, so that a signal meets a rollout."""

    def generate(self, *args: Any, should_stop: Callable[[], bool] | None = None, **kwargs: Any) -> Rollout:
        def slowly() -> bool:
            time.sleep(0.01)
            return should_stop is not None and should_stop()

        return super().generate(*args, should_stop=slowly, **kwargs)


TABLES: list[tuple[str, list[str], list[list[Any]], int]] = []
"""What ``TableLogger`` was given."""


class TableLogger(Logger):
    """A logger with tables, called as Lightning's ``WandbLogger`` is."""

    @property
    def name(self) -> str:
        return "tables"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        TABLES.append((key, columns, data, step))


@dataclass(kw_only=True)
class PulledBack(SurrogateObjective):
    """A log π − strength · (log π − log π_ref)²."""

    strength: float
    needs_ref_logprobs: ClassVar[bool] = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        gap = tokens.logprobs - tokens.ref_logprobs
        return tokens.advantages * tokens.logprobs - self.strength * gap.square()
