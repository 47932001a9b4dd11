"""``grpo-pl fit --branch RUN@S``: the rest of a run with other settings, and what became different."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from grpo_pl.cli.preflight import MAY_CHANGE
from grpo_pl.cli.trainer import GRPOCLI
from grpo_pl.evaluation.curves import read_curves
from grpo_pl.extras.replay import cache
from grpo_pl.extras.replay.comparison import compare, key_of
from grpo_pl.extras.replay.forward import check_data
from grpo_pl.extras.replay.moment import RecordedFit, checkpoint_at
from grpo_pl.extras.replay.recorded import RUN_REWARDS, CannotReplay, RecordedRun
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.files.runs import RunFolder, config_changes, read_settings
from grpo_pl.files.writing import best_effort, staged
from grpo_pl.training.lightning_loops import completed_rollouts

OPTION = "--branch"
OF_RUNS = ("trainer.logger", "checkpoint.", "completions.", "samples.", "digests.", "watch.", "profile")
"""Settings that say what a run keeps, and change nothing of what it computes."""
OTHER_DATA = ("data.source", "data.validation_sets")
"""Settings that name the data, and ``SAME_DATA`` those that only say how many problems a run asks, and when."""
SAME_DATA = ("data.steps: ", "data.prompts_per_step: ", "data.staleness: ")


def fit(args: Sequence[str], help_about: str) -> None:
    """Begins a run of its own with a run's settings and its state before a step.

    Args:
        args: those of ``grpo-pl fit``, with ``--branch RUN@S`` and ``--name NEW``, and other values for settings.

    Raises:
        CannotReplay: there is no such moment, or no name.
    """
    rest, given = _without(args, OPTION)
    if given is None:
        raise CannotReplay(f"{OPTION}: give a run and a step, such as runs/quickstart@40.")
    if not any(arg.partition("=")[0] == "--name" for arg in rest):
        raise CannotReplay(f"{OPTION} {given}: give the new run a name, --name NEW.")
    if any(arg.partition("=")[0] in ("--resume", "--ckpt_path") for arg in rest):
        raise CannotReplay(f"{OPTION} finds the checkpoint itself: leave out --resume and --ckpt_path.")
    name, at, number = given.rpartition("@")
    if not at or not number.isdecimal():
        raise CannotReplay(f"{OPTION} {given}: write RUN@S, such as runs/quickstart@40, with S from 0.")
    _, runs_dir = _without(rest, "--runs_dir")
    run, step = RecordedRun.open(name, runs_dir or "runs"), int(number)
    run.check_step(step)
    run.check_completions()
    switches = [arg for arg in rest if arg in (RUN_REWARDS, f"{RUN_REWARDS}=true")]
    rest = [arg for arg in rest if arg not in switches]
    if "RANK" in os.environ and step not in {0, *run.checkpoints(), *cache.made(run)}:
        found = ", ".join(map(str, sorted({0, *run.checkpoints()})))
        raise CannotReplay(
            f"{OPTION} {given}: several processes begin at a checkpoint ({found}); another step is made by "
            f"grpo_pl.extras.replay.checkpoint_at in one process first."
        )
    checkpoint = checkpoint_at(run, step, run_rewards=bool(switches))
    begin = [f"--config={run.folder.config}", *rest]
    begin += [] if checkpoint is None else [f"--ckpt_path={checkpoint.absolute()}"]
    BranchCLI(begin, help_about, run, step)


def _without(args: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """The arguments without an option, and its last value."""
    rest, value, waiting = list[str](), None, list(args)
    while waiting:
        arg = waiting.pop(0)
        flag, equals, text = arg.partition("=")
        if flag != option:
            rest.append(arg)
        else:
            value = text if equals else waiting.pop(0) if waiting else None
    return rest, value


class BranchCLI(GRPOCLI):
    """``fit`` from a moment of another run, into a folder of its own."""

    def __init__(self, args: list[str], help_about: str, run: RecordedRun, step: int) -> None:
        self._parent, self._step = run, step
        super().__init__(["fit", *args], help_about)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        settings = self.config[self.verb]
        settings.resume = False  # as its configuration may say, if the run was resumed
        if self._step == 0:
            settings.ckpt_path = None

    @property
    def _changes(self) -> list[str]:
        changes = config_changes(self._parent.settings, read_settings(self._resolved_config()))
        return [change for change in changes if not change.startswith(OF_RUNS)]

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        free = tuple(f"model.policy.{name}: " for name in MAY_CHANGE)
        fixed = ("model.template", "model.policy")
        wrong = [each for each in self._changes if each.startswith(fixed) and not each.startswith(free)]
        if wrong:
            raise CannotReplay(
                f"a branch keeps the template, tokenizer and model of its run, and this one has others ({wrong[0]}): "
                "begin a run of its own."
            )
        if any(change.startswith(OTHER_DATA) for change in self._changes):
            self.datamodule.allow_changed = True  # they are meant
        try:
            return super().instantiate_trainer(**kwargs)
        except CannotReplay:
            raise
        except (ValueError, CheckpointError, ImportError) as error:
            raise CannotReplay(f"{self._parent.path} cannot be branched so: {' '.join(str(error).split())}") from error

    def _check_checkpoint(self, path: Path) -> None:
        self._check_data()
        super()._check_checkpoint(path)

    def _check_data(self) -> None:
        changed = [change for change in self._changes if change.startswith("data.")]
        if all(change.startswith(SAME_DATA) for change in changed) and not self.datamodule.allow_changed:
            check_data(self.datamodule, self._parent.data_digest)

    def _open_run(self) -> list[Any]:
        self._check_data()
        callbacks = super()._open_run()
        assert self.run is not None
        return [BranchRecord(self._parent, self._step, self.run.folder, self._changes), *callbacks]


class BranchRecord(Callback):
    """Writes ``branch.json``: the moment that a run branches from, the curves of the other run from there on, and the
    first step and completion in which the two differ.

    Args:
        parent: the run that this is a branch of.
        step: completed rollouts at the branch.
        folder: of the branch.
        changes: settings that are others.
    """

    def __init__(self, parent: RecordedRun, step: int, folder: RunFolder, changes: Sequence[str]) -> None:
        self.parent, self.step, self.folder, self.changes = parent, step, folder, changes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, {})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._write(trainer, told := first_differences(self.parent, self.folder, self.step))
            print(told_in_a_line(self.parent, told), file=sys.stderr)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.folder.branch.exists() and completed_rollouts(trainer) > self.step:
            self._write(trainer, first_differences(self.parent, self.folder, self.step))

    def _write(self, trainer: Trainer, found: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        curves = {
            name: after
            for name, points in read_curves(self.parent.folder.metrics).items()
            if (after := [point for point in points if point[0] > self.step])
        }
        told = {
            "run": self.parent.path.resolve().name,
            "step": self.step,
            "changes": list(self.changes),
            **found,
            "curves": curves,
        }
        with best_effort(self.folder.branch), staged(self.folder.branch) as file:
            file.write_text(json.dumps(told, ensure_ascii=False) + "\n", encoding="utf-8")


def first_differences(parent: RecordedRun, branch: RunFolder, step: int) -> dict[str, Any]:
    """The first thing in which a branch differs from its run, and the first completion whose text does; None each where
    nothing differs, as far as both have come."""
    ours = RecordedFit(branch)
    end = min(parent.completed, ours.completed)
    first = compare(parent, ours, step, end).first
    made = {key_of(row): row for row in ours.completions(step, end)}
    pairs = ((row, made.get(key_of(row))) for row in parent.completions(step, end))
    other = next(((row, mine) for row, mine in pairs if mine and row["completion"] != mine["completion"]), None)
    completion = None
    if other is not None:
        names = ("step", "prompt_id", "sample", "question")
        completion = {name: other[0][name] for name in names}
        completion |= {"there": other[0]["completion"], "here": other[1]["completion"]}
    return {"compared": end - step, "first": None if first is None else asdict(first), "completion": completion}


def told_in_a_line(parent: RecordedRun, told: dict[str, Any]) -> str:
    """The line at the end of a branch."""
    first, other, name = told["first"], told["completion"], Path(parent.path).name
    if first is None:
        return f"{told['compared']} rollouts are bit for bit those of {name}."
    where = f"rollout {first['step'] + 1} is the first that differs from {name}, in {first['what']}"
    if other is None:
        return f"{where}; no completion that both have recorded differs."
    of = f"prompt {other['prompt_id']}, sample {other['sample']}, of rollout {other['step'] + 1}"
    return f"{where}; the first completion that differs is {of}: {other['there']!r} there, {other['here']!r} here."
