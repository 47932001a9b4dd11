"""``WriteReport``: ``report.html`` at the end of a fit."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.extras.report.page import write_report
from grpo_pl.files.runs import RunFolder


class WriteReport(Callback):
    """Writes the report of ``folder``.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self.folder.metrics.exists():
            try:
                write_report(self.folder)
            except (OSError, ValueError) as error:  # such as a full disk; the run's own end says more
                reason = str(getattr(error, "strerror", None) or error).rstrip(".")
                line = f"{self.folder.report} cannot be written: {reason}."
                rank_zero_warn(f"{line} `grpo-pl report {self.folder.path}` writes it once it can be.")
