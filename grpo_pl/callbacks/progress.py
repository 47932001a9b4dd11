"""``StageProgress``: one bar for the run and one for the stage in flight, so that a long step shows its progress."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpo_pl.callbacks.lightning_loops import completed_rollouts
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.progress import LOG_EVERY_SECONDS

SHOWN = {
    "reward": "reward",
    "completions/correct": "right",
    "val/pass@1": "held-out pass@1",
    "completions/mean_length": "length",
    "kl": "kl",
}
"""Metric -> its short name beside the run's bar."""


class StageProgress(StepCallback, ProgressBar):
    """A terminal gets moving bars; a log file gets a line every few seconds and for each validation."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._run = self._stage = TaskID(0)
        self._stage_name = ""
        self._last_line = 0.0
        self._enabled = True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._console.print(*args)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._show_run(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        logged = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        held_out = {name: value for name, value in logged.items() if value or not name.endswith("/unjudged")}
        first = ("val/pass@1", "val/greedy")
        ordered = sorted(held_out.items(), key=lambda item: (item[0] not in first, item[0]))
        numbers = "  ".join(f"{name} {float(value):.3f}" for name, value in ordered)
        line = f"rollout {completed_rollouts(trainer)}: {numbers}"
        self._console.print(line, highlight=False, soft_wrap=not self._console.is_terminal)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def on_stage_progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        if self._bars is not None:
            if stage != self._stage_name:
                self._stage_name = stage
                self._bars.reset(self._stage, total=total, description=stage)
            self._bars.update(self._stage, completed=done, total=total, note=note)

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _start(self, trainer: Trainer) -> None:
        if self._bars is None and self._enabled and trainer.is_global_zero and self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:>10}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._run = self._bars.add_task("rollouts", total=self._total(trainer), note="")
            self._stage = self._bars.add_task("", total=1, note="")
            self._bars.start()

    def _show_run(self, trainer: Trainer) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        done, total = completed_rollouts(trainer), self._total(trainer)
        metrics = trainer.callback_metrics
        note = "  ".join(f"{short} {float(metrics[name]):.3f}" for name, short in SHOWN.items() if name in metrics)
        if self._bars is not None:
            self._bars.update(self._run, completed=done, total=total, note=note)
        elif time.monotonic() - self._last_line >= LOG_EVERY_SECONDS or done == total:
            self._last_line = time.monotonic()
            self._console.print(f"rollout {done}/{total}: {note}", highlight=False, soft_wrap=True)

    @staticmethod
    def _total(trainer: Trainer) -> int:
        return int(trainer.datamodule.steps)  # type: ignore[attr-defined]
