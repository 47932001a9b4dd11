"""``SignalWatch``: warns of a run in which nothing can be learnt, because all completions of a group get one reward."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.report.no_signal import CAUSES, ROLLOUTS


class SignalWatch(Callback):
    """Counts rollouts in a row without a group of unequal rewards; one warning a run, also over a resume."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row, "warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row, self._warned = state_dict["in_a_row"], state_dict["warned"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_a_row = 0 if bool(outputs["experience"].statistics.informative.any()) else self._in_a_row + 1
        if self._in_a_row >= ROLLOUTS and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"No learning signal: the rewards of every group were equal for {ROLLOUTS} rollouts. {CAUSES}"
            )
