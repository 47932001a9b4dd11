"""``SignalWatch``: warns of a run in which nothing can be learnt, because rewards are equal in every group."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.evaluation.curves import CAUSES, SILENT_ROLLOUTS, SilentRollouts


class SignalWatch(Callback):
    """Warns once a run, also over a resume."""

    def __init__(self) -> None:
        self._silent = SilentRollouts()
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._silent.in_a_row, "warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._silent, self._warned = SilentRollouts(state_dict["in_a_row"]), state_dict["warned"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        equal = not bool(outputs["experience"].statistics.informative.any())
        if self._silent.add(batch.step + 1, float(equal)) and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"No learning signal: the rewards of every group were equal for {SILENT_ROLLOUTS} rollouts. {CAUSES}"
            )
