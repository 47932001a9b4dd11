"""``RolloutCheckpoint``: saves every N rollouts and at the end, keeps the newest ones, and links the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from grpo_pl.optimization import TrainingDiverged

LAST = "last.ckpt"


class RolloutCheckpoint(Checkpoint):
    """Lightning's ModelCheckpoint counts optimiser steps; a run is counted in rollouts, which may take several.

    Args:
        every_n_rollouts: rollouts between two checkpoints.
        keep: newest checkpoints that stay.
    """

    def __init__(self, every_n_rollouts: int = 25, keep: int = 2) -> None:
        super().__init__()
        if every_n_rollouts < 1 or keep < 1:
            raise ValueError(
                f"checkpoint needs every_n_rollouts >= 1 and keep >= 1, got {every_n_rollouts} and {keep}."
            )
        self.every_n_rollouts, self.keep = every_n_rollouts, keep
        self.folder: Path | None = None
        """Set by the command line to the run's folder; None saves nothing."""
        self._saved_at = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _completed(trainer) % self.every_n_rollouts == 0:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, TrainingDiverged) and self._saved_at >= 0 and self.folder is not None:
            exception.last_checkpoint = self._path(self._saved_at)

    def save(self, trainer: Trainer) -> None:
        """Saves the state after the last completed rollout, unless it is saved already."""
        completed = _completed(trainer)
        if self.folder is None or completed == self._saved_at or trainer.fast_dev_run:
            return
        path = self._path(completed)
        trainer.save_checkpoint(path)  # Lightning writes to a temporary name and renames
        self._saved_at = completed
        if trainer.is_global_zero:
            link = self.folder / (LAST + ".partial")
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            os.replace(link, self.folder / LAST)
            for old in sorted(self.folder.glob("rollout-*.ckpt"))[: -self.keep]:
                old.unlink()
        trainer.strategy.barrier()

    def _path(self, completed: int) -> Path:
        assert self.folder is not None
        return self.folder / f"rollout-{completed:06d}.ckpt"


def _completed(trainer: Trainer) -> int:
    return int(trainer.datamodule.completed_rollouts)  # type: ignore[attr-defined]
