"""``RewardModelCLI``: ``grpo-pl fit`` for a configuration with ``model.classifier``, into a run folder of its own."""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch.cli import LightningArgumentParser

from grpo_pl.cli.step_run import StepRunCLI
from grpo_pl.extras.preferences.reward_model import PreferenceData, RewardModelModule
from grpo_pl.processes.rank import is_first_process


class RewardModelCLI(StepRunCLI):
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

    def after_fit(self) -> None:
        super().after_fit()
        if is_first_process() and self.model.agreement is not None:
            value, low, high = self.model.agreement
            print(
                f"agrees with {value:.3f} ({low:.3f} … {high:.3f}) of {len(self.datamodule.val_pairs)} held-out pairs; "
                f"{self.folder.export} is a model for grpo_pl.rewards.ModelReward."
            )
