"""The Trainer's plugin that reads and writes checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from grpo_pl.files.checkpoints import save_tensors
from grpo_pl.files.sharded_checkpoints import read_checkpoint


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints atomically and reads them without running code that they contain."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        save_tensors(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))
