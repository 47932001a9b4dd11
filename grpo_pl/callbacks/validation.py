"""``ValidateAtBothEnds``: held-out numbers before the first update and after the last, whatever the interval."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.callbacks.lightning_loops import completed_rollouts, validate_now
from grpo_pl.callbacks.metrics_csv import MetricsCSV


class ValidateAtBothEnds(Callback):
    """Lightning validates every ``trainer.val_check_interval`` rollouts; this adds rollout 0 and the end of the run.

    After a resume it repeats a validation that was due at the checkpoint but did not finish, and drops from
    ``metrics.csv`` what is logged again.
    """

    def __init__(self) -> None:
        self._validated_at = -1  # completed rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"validated_at": self._validated_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated_at = state_dict["validated_at"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        completed = completed_rollouts(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.resume(completed, validated_at=self._validated_at)
        due = completed % (trainer.val_check_batch or 1) == 0  # between this rollout and the next
        if self._validated_at != completed and due:
            validate_now(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = completed_rollouts(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_at != completed_rollouts(trainer):
            validate_now(trainer)
