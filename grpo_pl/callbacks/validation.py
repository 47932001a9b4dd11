"""``ValidateAtBothEnds``: held-out numbers before the first update and after the last, whatever the interval."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class ValidateAtBothEnds(Callback):
    """Lightning validates every ``trainer.val_check_interval`` rollouts; this adds rollout 0 and the end of the run."""

    def __init__(self) -> None:
        self._validated_at = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _completed(trainer) == 0:
            self._validate(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = _completed(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_at != _completed(trainer):
            self._validate(trainer)

    @staticmethod
    def _validate(trainer: Trainer) -> None:
        """Runs the trainer's own validation loop inside ``fit``, as the training loop does at an interval."""
        if not trainer.enable_validation:
            return
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True


def _completed(trainer: Trainer) -> int:
    """Rollouts, not ``global_step``: that counts optimiser steps, and a rollout of equal rewards takes none."""
    return int(trainer.datamodule.completed_rollouts)  # type: ignore[attr-defined]
