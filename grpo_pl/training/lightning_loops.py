"""Access to Lightning 2.6's parts that has no public or no typed way; a test fails where a later version moves them."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Trainer

from grpo_pl.data.datamodule import RolloutDataModule


def data_of(trainer: Trainer) -> RolloutDataModule:
    """The data of a run."""
    return cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]


def completed_rollouts(trainer: Trainer) -> int:
    """Rollouts, not ``global_step``: that counts optimiser steps, and a rollout of equal rewards takes none."""
    return data_of(trainer).completed_rollouts


def validate_now(trainer: Trainer) -> None:
    """Runs the trainer's own validation loop inside ``fit``, as the training loop does at an interval."""
    if trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True


def set_progress(checkpoint: dict[str, Any], rollouts: int) -> None:
    """Sets Lightning's counters in a checkpoint to "rollout n has just ended", wherever in the loop it was made."""
    counted = {"ready": rollouts, "started": rollouts, "processed": rollouts, "completed": rollouts - 1}
    epoch = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    none = dict.fromkeys(counted, 0)
    fit = checkpoint["loops"]["fit_loop"]
    fit["epoch_progress"] = {"total": epoch, "current": dict(epoch)}
    fit["epoch_loop.batch_progress"] = {"total": counted, "current": dict(counted), "is_last_batch": False}
    fit["epoch_loop.val_loop.batch_progress"] = {"total": none, "current": dict(none), "is_last_batch": False}
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = rollouts - 1
    checkpoint["epoch"] = 0
