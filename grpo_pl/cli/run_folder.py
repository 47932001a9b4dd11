"""Arguments, callbacks and loggers of a Trainer that fills a run folder, on the command line and in Python."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.loggers import Logger

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.callbacks.completions import CompletionsLog
from grpo_pl.callbacks.digests import Digests
from grpo_pl.callbacks.export import ExportPolicy
from grpo_pl.callbacks.held_out import HeldOutLog, ValidateAtBothEnds
from grpo_pl.callbacks.metrics_csv import EventFiles, MetricsCSV
from grpo_pl.callbacks.progress import StageProgress
from grpo_pl.callbacks.record import RunRecord
from grpo_pl.callbacks.samples import SampleTable
from grpo_pl.callbacks.summary import ClosingTable, SignalWatch, StartSummary
from grpo_pl.callbacks.termination import StopOnSignal
from grpo_pl.distributed.strategy import CheckpointFiles, FSDP2Strategy, launched_devices
from grpo_pl.files.runs import OpenRun, RunFolder, check_name, resume_run, start_run
from grpo_pl.policy.quiet import quiet_libraries
from grpo_pl.processes.rank import is_first_process

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,  # a run is one pass over `data.steps` rollouts
    "val_check_interval": 50,  # rollouts
    "check_val_every_n_epoch": None,  # count rollouts of the run, which may be fewer than the interval
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "inference_mode": False,  # its tensors cannot enter a later backward pass
    "use_distributed_sampler": False,  # the data module cuts by rank itself
    "enable_model_summary": False,
}
"""Settings of Lightning's Trainer that every run has."""


WITH_SETTINGS = (RolloutCheckpoint, CompletionsLog, SampleTable, Digests)
"""Callbacks of every ``fit`` whose settings stand in its configuration."""


def open_run(root: str | Path, name: str, *, config: str | None = None, resume: bool = False) -> OpenRun:
    """Claims ``root/name``, or ``root/name-2`` … where that exists, for this process and those launched with it. From
    here on, libraries keep messages to themselves that nobody can act on.

    Args:
        config: what becomes ``config.yaml`` of a new run.
        resume: go on with the newest run of that name, where there is one; its last whole checkpoint is
            ``OpenRun.checkpoint``.
    """
    if re.match(r"\w+:/", str(root)):  # a Path has one slash of a URL's two
        raise ValueError(f"--runs_dir is {str(root)!r}, and a run is written to files of this machine: mount it there.")
    check_name(name)
    quiet_libraries()
    try:
        return (resume_run if resume else start_run)(Path(root), name, config, first=is_first_process())
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        raise ValueError(
            f"--runs_dir is {str(root)!r}, and {error.filename or name} cannot be written there ({error.strerror})"
            f"{': name a folder in which you may write.' if forbidden else '.'}"
        ) from error


def trainer_arguments(folder: RunFolder, **others: Any) -> dict[str, Any]:
    """Arguments of Lightning's ``Trainer`` with which ``fit`` fills a run folder as ``grpo-pl fit`` does: metrics,
    completions, checkpoints, the report and the export.

    Args:
        folder: the run's folder, from :func:`open_run`.
        others: further arguments, and other values for ``TRAINER_DEFAULTS``; ``callbacks``, ``logger`` and ``plugins``
            add to those of a run, where a callback takes the place of the run's own one that it is or extends.
    """
    given = as_list(others.pop("callbacks", None))
    own = [StageProgress(), *run_callbacks(folder), *(kind() for kind in WITH_SETTINGS)]
    own += _made("RewardWatch")
    callbacks = [*given, *(callback for callback in own if not any(replaces(callback, mine) for mine in given))]
    write_into(folder, callbacks)
    arguments = {
        **TRAINER_DEFAULTS,
        "devices": "auto",
        "num_nodes": 1,
        "strategy": "auto",
        **others,
        "default_root_dir": str(folder.path),
        "logger": run_loggers(folder, as_list(others.get("logger"))),
        "callbacks": callbacks,
    }
    follow_launcher(arguments)
    return arguments


def replaces(own: Callback, given: Callback) -> bool:
    """A callback stands for the run's own one that it is or extends; there is one progress bar, whatever its class."""
    return isinstance(given, ProgressBar if isinstance(own, ProgressBar) else type(own))


def run_callbacks(folder: RunFolder, next_command: str | None = None) -> list[Callback]:
    """The callbacks of every ``fit`` that have no settings of their own.

    Args:
        next_command: what the closing table suggests to type next.
    """
    return [
        StopOnSignal(),
        StartSummary(),
        RunRecord(folder.record),
        HeldOutLog(folder.held_out),
        SignalWatch(),
        *_made("Doctor"),
        *_made("MidCourse"),
        ValidateAtBothEnds(),
        ExportPolicy(folder.export),
        *_made("WriteReport", folder),
        ClosingTable(folder, next_command or f"grpo-pl serve --model {folder.export}"),
    ]


EXTRAS = {
    "Doctor": "grpo_pl.extras.doctor.callback",
    "MidCourse": "grpo_pl.extras.doctor.callback",
    "RewardWatch": "grpo_pl.extras.watch.callback",
    "WriteReport": "grpo_pl.extras.report.callback",
}
"""Default callbacks that no training needs -> their modules; one that is not installed is left out."""


@cache
def extra_callback(name: str) -> type[Callback] | None:
    """One of ``EXTRAS``; None, and a line on stderr, where its module is missing."""
    try:
        found: type[Callback] = getattr(import_module(EXTRAS[name]), name)
    except ModuleNotFoundError as error:
        if not f"{EXTRAS[name]}.".startswith(f"{error.name}."):
            raise
        if is_first_process():
            print(f"{name} is left out: {EXTRAS[name]} is not installed.", file=sys.stderr)
        return None
    return found


def _made(name: str, *arguments: Any) -> list[Callback]:
    kind = extra_callback(name)
    return [] if kind is None else [kind(*arguments)]


def run_loggers(folder: RunFolder, others: Sequence[Logger] = ()) -> list[Logger]:
    """``metrics.csv`` and TensorBoard's files, and ``others`` beside them."""
    return [MetricsCSV(folder.metrics), EventFiles(folder.path), *others]


def write_into(folder: RunFolder, callbacks: Iterable[Callback]) -> None:
    """Gives the callbacks that write files their paths in the run's folder."""
    for callback in callbacks:
        if isinstance(callback, RolloutCheckpoint):
            callback.folder = folder.checkpoints
        elif isinstance(callback, CompletionsLog):
            callback.path = folder.completions
        elif isinstance(callback, Digests):
            callback.folder = folder
        elif (watch := extra_callback("RewardWatch")) is not None and isinstance(callback, watch):
            callback.path = folder.suspicious  # type: ignore[attr-defined]


def follow_launcher(arguments: Any) -> None:
    """Changes arguments of the Trainer so that one configuration serves any number of processes: as many devices as
    torchrun or SLURM started, and checkpoints as they are read and written here."""
    if arguments["devices"] == "auto":
        arguments["devices"], nodes = launched_devices()
        arguments["num_nodes"] = max(arguments["num_nodes"], nodes)
    if not isinstance(arguments["strategy"], FSDP2Strategy):  # which brings its own
        arguments["plugins"] = [*as_list(arguments.get("plugins")), CheckpointFiles()]


def as_list(given: Any) -> list[Any]:
    """One, many or none of something, as Lightning takes them."""
    return list(given) if isinstance(given, list | tuple) else [] if given in (None, True, False) else [given]
