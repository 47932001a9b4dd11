"""``KeepConfiguration``: replaces a resumed run's ``config.yaml`` once its checkpoint has been loaded."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.files.runs import RunFolder, keep_config
from grpo_pl.files.writing import best_effort


class KeepConfiguration(Callback):
    """Writes the configuration at the start of training, when the checkpoint has been accepted.

    Args:
        folder: the run's folder.
        config: the resolved configuration.
    """

    def __init__(self, folder: RunFolder, config: str) -> None:
        self.folder, self.config = folder, config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with best_effort(self.folder.config):
                keep_config(self.folder, self.config)
