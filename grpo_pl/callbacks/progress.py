"""``StageProgress``: how far the run is and the stage in flight, as moving bars or as lines of a log file."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.lightning_loops import completed_rollouts, data_of
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.progress import LOG_EVERY_SECONDS

SHOWN = {
    "reward": "reward",
    "completions/correct": "right",
    "val/pass@1": "held-out pass@1",
    "val/reward": "held-out reward",
    "completions/mean_length": "length",
    "kl": "kl",
}
"""Metric -> its short name beside the run's bar."""

DONE = {
    "cold start": "steps taken",
    "rollout": "completions drawn",
    "reward": "completions scored",
    "update": "optimiser steps taken",
    "validate": "held-out completions drawn",
}
"""Stage -> what of it is counted."""

QUIET_SECONDS = 20.0
"""A log file that got no line for so long gets one that says how far the stage in flight is."""


class StageProgress(StepCallback, ProgressBar):
    """A terminal gets moving bars. A log file gets a line every few seconds, for each validation, and wherever it would
    be silent for longer: while an engine starts, in a long rollout, in a reward that takes minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._run = self._stage = TaskID(0)
        self._enabled = True
        self._began = self._spoke = time.monotonic()  # of the stage in flight, and of the newest line
        self._last_line = 0.0  # when one was about a whole rollout, or a step of the cold start
        self._at = ("", 0, 0, "")  # stage, done, total and note
        self._told = False
        self._ended = Event()  # of the thread that speaks where it is quiet

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._console.print(*args)

    # --- Lightning's hooks ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._enter("")
        self._last_line = 0.0
        path = cast(GRPOModule, pl_module).policy_config.path
        self._say("loading the policy" + (f" {path}" if path else ""))
        self._ended.clear()
        if self._enabled and not self._console.is_terminal:
            Thread(target=self._break_silence, args=(trainer,), name="grpo_pl-progress", daemon=True).start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell_policy(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._enter("rollout")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._show_run(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell_policy(pl_module)
        first = self._at[0] == ""
        self._enter("validate")
        if self._enabled and first:
            data, processes = data_of(trainer), cast(GRPOModule, pl_module).collective.world
            share = data.held_out_share(int(sum(trainer.num_val_batches)))
            problems = min(sum(map(len, data.held_out().values())), share * processes)
            self._say(f"validation of {problems} held-out problems, after rollout {completed_rollouts(trainer)}")
        self._start(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        held_out = {name: value for name, value in logged.items() if value or not name.endswith("/unjudged")}
        first = ("val/pass@1", "val/greedy", "val/reward")
        ordered = sorted(held_out.items(), key=lambda item: (item[0] not in first, item[0]))
        numbers = "  ".join(f"{name} {float(value):.3f}" for name, value in ordered)
        self._say(f"rollout {completed_rollouts(trainer)}: {numbers}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("end")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def on_stage_progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "cold start":  # before there is a run to show
            self._show_bars()
        if stage != self._at[0]:
            self._enter(stage)
        self._at = (stage, done, total, note)
        last = stage == "cold start" and done == total
        if self._bars is not None:
            self._bars.update(self._stage, completed=done, total=total, note=note, refresh=last)
        elif stage == "cold start" and self._line_is_due(last):
            self._say(f"cold start: {done}/{total} {note}")
        if last:
            self._enter("")  # the policy is loaded
            self._last_line = 0.0

    # --- what is shown ----------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        self._spoke = time.monotonic()
        if self._enabled:
            self._console.print(line, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)

    def _tell_policy(self, pl_module: LightningModule) -> None:
        if self._told or not self._enabled:
            return
        self._told = True
        policy = cast(GRPOModule, pl_module).require_policy()
        whole, trained = policy.num_parameters(), policy.num_parameters(only_trainable=True)
        share = "" if trained == whole else f", of which {trained:,} are trained"
        took = time.monotonic() - self._began
        self._say(f"policy: {type(policy).__name__} of {whole:,} parameters{share}; loaded in {took:.0f} s")

    def _enter(self, stage: str) -> None:
        self._began, self._at = time.monotonic(), (stage, 0, 0, "")
        if self._bars is not None:
            self._bars.reset(self._stage, total=1, description=stage)

    def _break_silence(self, trainer: Trainer) -> None:
        while not self._ended.wait(QUIET_SECONDS / 10):
            if time.monotonic() - self._spoke >= QUIET_SECONDS:
                self._say(self._state(trainer))

    def _state(self, trainer: Trainer) -> str:
        """Progress of the current stage, time since it began, and time left at this rate."""
        (stage, done, total, note), seconds = self._at, time.monotonic() - self._began
        left = f", about {_clock(seconds * (total / done - 1))} left" if 0 < done < total else ""
        counted = f" {done}/{total} {DONE.get(stage, stage)}" if total else ""
        if stage == "":
            return f"starting, engine included: {_clock(seconds)}"
        if stage == "end":
            return f"writing checkpoint, export and report: {_clock(seconds)}"
        completed = completed_rollouts(trainer)
        where = "validation" if stage == "validate" else f"rollout {completed + 1}/{data_of(trainer).steps}"
        return f"{where}:{counted}{f', {note}' if note else ''} in {_clock(seconds)}{left}"

    def _stop(self) -> None:
        self._ended.set()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _start(self, trainer: Trainer) -> None:
        self._show_bars()
        if self._bars is not None:
            self._bars.update(self._run, total=data_of(trainer).steps, visible=True)

    def _show_bars(self) -> None:
        if self._bars is None and self._enabled and self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:>10}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._run = self._bars.add_task("rollouts", total=1, note="", visible=False)
            self._stage = self._bars.add_task("", total=1, note="")
            self._bars.start()

    def _show_run(self, trainer: Trainer) -> None:
        done, total = completed_rollouts(trainer), data_of(trainer).steps
        metrics = trainer.callback_metrics
        note = "  ".join(f"{short} {float(metrics[name]):.3f}" for name, short in SHOWN.items() if name in metrics)
        if self._bars is not None:
            self._bars.update(self._run, completed=done, total=total, note=note)
        elif self._line_is_due(done == total):
            self._say(f"rollout {done}/{total}: {note}")

    def _line_is_due(self, last: bool) -> bool:
        """True for the last of its kind, and if the one before was some seconds ago."""
        due = last or time.monotonic() - self._last_line >= LOG_EVERY_SECONDS
        self._last_line = time.monotonic() if due else self._last_line
        return due


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
