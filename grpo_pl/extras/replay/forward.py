"""``Forward``: a fit of a recorded run's own configuration that ends before a step, in a folder of the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.callbacks.metrics_csv import MetricsCSV
from grpo_pl.callbacks.record import data_digest
from grpo_pl.cli.trainer import GRPOCLI
from grpo_pl.config.objects import ConfigError
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.extras.replay.recorded import CannotBegin, CannotReplay, RecordedRun, given_settings, threads_of
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.files.runs import read_settings
from grpo_pl.training.lightning_loops import completed_rollouts

NAME = "made"
"""Folder of the fit, below the place that it is given."""
OPTIONS = {
    "trainer.limit_val_batches": "0",  # validations change nothing of what follows
    "trainer.max_time": "null",
    "trainer.logger": "false",
    "trainer.profiler": "null",
    "samples.every_n_rollouts": "0",
    "checkpoint.every_n_rollouts": "0",
    "checkpoint.every_n_minutes": "null",
    "checkpoint.keep_best": "0",
    "digests.every_n_rollouts": "1",
}
"""What is other in a replay than in the run."""
ALONE = {"trainer.devices": "1", "trainer.num_nodes": "1", "trainer.strategy": "auto"}
"""What is other where one process looks at the run of several."""


class StopBefore(Callback):
    """Ends a fit before a step, as if it were the run's end."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = completed_rollouts(trainer) >= self.step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = completed_rollouts(trainer) >= self.step


class Forward(GRPOCLI):
    """``fit`` of a recorded configuration up to a step: the run's own callbacks write into a folder of the cache."""

    def __init__(self, args: list[str], step: int, data_digest: str | None, callbacks: Sequence[Callback] = ()) -> None:
        self._step, self._data_digest, self._callbacks = step, data_digest, callbacks
        super().__init__(["fit", *args])

    def say(self, line: str) -> None:
        """Says nothing: the run has said it."""

    def _check_checkpoint(self, path: Path) -> None:
        self._check_data()
        super()._check_checkpoint(path)

    def _check_data(self) -> None:
        check_data(self.datamodule, self._data_digest)

    def _open_run(self) -> list[Any]:
        self._check_data()
        built = self._built
        config = self._resolved_config()
        self.model.settings = read_settings(config)["model"]
        folder = self._claim_folder(config, built.checkpoint, built.completions, built.digests, built.watch)
        built.trainer["logger"] = [MetricsCSV(folder.metrics)]
        return [StopBefore(self._step), *self._callbacks]


def check_data(data: RolloutDataModule, recorded: str | None) -> None:
    """Refuses data that are others than those of the run.

    Args:
        recorded: what `data_digest` gave when the run began; None where it is not known.
    """
    if recorded is not None and data_digest(data) != recorded:
        files = sorted({path for _, path in data.digests().values() if path})
        raise CannotBegin(
            f"the data hold other problems than when the run began (run.json has another digest{' of ' * bool(files)}"
            f"{', '.join(files)}): put back what was there."
        )


def run_forward(
    run: RecordedRun,
    checkpoint: Path | None,
    step: int,
    folder: Path,
    changes: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Forward:
    """Plays a run forward in this process, or with those that torchrun started beside it, to before ``step``, with the
    run's threads. Its files are those of ``folder``/`NAME`.

    Args:
        checkpoint: where it goes on from; None begins at the run's start.
        changes: other values of settings.
        callbacks: look on.

    Raises:
        CannotReplay: the run cannot begin here; one line says why.
    """
    folder.mkdir(exist_ok=True)
    given = folder / "given.yaml"
    given.write_text(given_settings(run.config), encoding="utf-8")
    options = {**OPTIONS, "runs_dir": str(folder), "name": NAME, **(changes or {})}
    options |= {} if checkpoint is None else {"ckpt_path": str(checkpoint.absolute())}
    args = [f"--config={given}", *(f"--{key}={value}" for key, value in options.items())]
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with _threads(threads_of(run)):
            return Forward(args, step, run.data_digest, callbacks)
    except (CannotReplay, KeyboardInterrupt):
        raise
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # which Lightning turns into a status of 1
            signal.signal(signal.SIGINT, on_interrupt)  # it ignores further ones
            raise KeyboardInterrupt from stop
        raise
    except (ConfigError, ValueError, CheckpointError, ImportError) as error:
        raise CannotBegin(f"{run.path} cannot be replayed here: {' '.join(str(error).split())}") from error


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- several processes ------------------------------------------------------------------------------------------------


def run_forward_in_children(
    run: RecordedRun,
    checkpoint: Path | None,
    step: int,
    folder: Path,
    changes: Mapping[str, str] | None = None,
    asked: Mapping[str, str] | None = None,
) -> None:
    """The same in as many new processes as the run had, on this machine, by torchrun.

    Args:
        asked: the fields of `Asked` for a `Curve` that looks on.

    Raises:
        CannotReplay: they failed; the line of the first that did.
    """
    start = None if checkpoint is None else str(checkpoint)
    given = json.dumps([str(run.path), start, step, str(folder), changes, asked])
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.processes}"]
    command = [sys.executable, *launcher, "-m", "grpo_pl.extras.replay", given]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads_of(run))}) as children:
        try:
            status = children.wait()
        except BaseException:
            children.terminate()
            raise
    failed = sorted(folder.glob("failed-*"))
    if failed:
        raise CannotBegin(failed[0].read_text(encoding="utf-8"))
    if status:
        raise CannotReplay(f"{run.path}: the {run.processes} processes of the replay ended with status {status}.")
