"""``StepRunCLI``: runs whose batches are optimiser steps, into a folder with metrics, checkpoints and export."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar

from grpo_pl.callbacks.held_out import ValidateAtBothEnds
from grpo_pl.callbacks.record import KeepConfiguration
from grpo_pl.callbacks.termination import StopOnSignal
from grpo_pl.cli.preflight import check_lightning
from grpo_pl.cli.run_folder import as_list, follow_launcher
from grpo_pl.cli.trainer import RunCLI


class StepRunCLI(RunCLI):
    """``fit`` of a `StepModule` on `StepData`."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = self._built.trainer
        check_lightning(trainer)
        self.check()
        config = self._resolved_config()
        self.folder = self._claim_folder(config, self._built.checkpoint)
        own = [StopOnSignal(), ValidateAtBothEnds(), KeepConfiguration(self.folder, config)]
        if trainer["enable_progress_bar"] is not False and sys.stderr.isatty():
            own.append(RichProgressBar())
        else:
            trainer["enable_progress_bar"] = False
        trainer["callbacks"] = [*as_list(trainer["callbacks"]), *own]
        follow_launcher(trainer)
        made = super().instantiate_trainer(**kwargs)
        self.datamodule.check_shares(made.num_devices * made.num_nodes)
        return made

    def check(self) -> None:
        """Refuses what would fail after the start, before the run has a folder."""
        self.model.check(self.datamodule)

    def after_fit(self) -> None:
        self.model.export(self.folder.export)
