"""``KeepConfiguration``: a run's settings in its ``config.yaml``, and those of its module in every checkpoint."""

from __future__ import annotations

from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.files.runs import RunFolder, keep_config
from grpo_pl.files.writing import dispensable
from grpo_pl.policy.trained import HYPERPARAMETERS


class KeepConfiguration(Callback):
    """Writes the configuration at the start of training, when the checkpoint that is resumed has been accepted. What is
    saved holds what ``GRPOModule.load_from_checkpoint`` builds the module from.

    Args:
        folder: the run's folder.
        config: the resolved configuration.
    """

    def __init__(self, folder: RunFolder, config: str) -> None:
        self.folder, self.config = folder, config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with dispensable(self.folder.config):
                keep_config(self.folder, self.config)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[HYPERPARAMETERS] = yaml.safe_load(self.config)["model"]
