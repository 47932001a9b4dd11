"""``RewardModelCLI``: ``grpo-pl fit`` for a configuration with ``model.classifier``, into a run folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser

from grpo_pl.callbacks.held_out import ValidateAtBothEnds
from grpo_pl.callbacks.record import KeepConfiguration
from grpo_pl.callbacks.termination import StopOnSignal
from grpo_pl.cli.preflight import check_lightning
from grpo_pl.cli.run_folder import as_list, follow_launcher
from grpo_pl.cli.trainer import RunCLI
from grpo_pl.config.objects import read_arguments
from grpo_pl.distributed.strategy import is_first_process
from grpo_pl.training.reward_model import PreferenceData, RewardModelModule


def trains_reward_model(args: Sequence[str]) -> bool:
    """True if the files or options of a ``fit`` name a ``model.classifier``."""
    return "model.classifier" in read_arguments(args)


class RewardModelCLI(RunCLI):
    """``fit`` of a reward model: metrics, checkpoints, and at the end the export that a ``ModelReward`` loads."""

    unnamed = "reward_model"

    def __init__(self, args: list[str]) -> None:
        with ExitStack() as self._end:
            super().__init__(
                RewardModelModule,
                PreferenceData,
                args,
                parser_kwargs={"prog": "grpo-pl", "description": "Trains a reward model on pairs of completions."},
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"checkpoint.monitor": "val/agreement"})

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = self._built.trainer
        check_lightning(trainer)
        self.model.check(self.datamodule)
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

    def after_fit(self) -> None:
        self.model.export(self.folder.export)
        if is_first_process() and self.model.agreement is not None:
            value, low, high = self.model.agreement
            print(
                f"agrees with {value:.3f} ({low:.3f} … {high:.3f}) of {len(self.datamodule.val_pairs)} held-out pairs; "
                f"{self.folder.export} is a model for grpo_pl.rewards.ModelReward."
            )
