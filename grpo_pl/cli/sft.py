"""``SFTCLI``: ``grpo-pl sft``, supervised fine-tuning into a run folder, with an export that serves and trains on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser

from grpo_pl.cli.preflight import check_resume, check_trainer
from grpo_pl.cli.run_folder import as_list
from grpo_pl.cli.step_run import StepRunCLI
from grpo_pl.cli.trainer import TrainerParser, order_help, say
from grpo_pl.config.shipped import shipped_file
from grpo_pl.config.suggestions import nearest
from grpo_pl.evaluation.model_card import sft_card
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.files.runs import read_settings
from grpo_pl.processes.rank import is_first_process
from grpo_pl.training.defaults import table
from grpo_pl.training.sft_module import SFTData, SFTModule

HELD_OUT = ("val/loss", "val/likelihood")
"""What a validation measures."""


class _Parser(TrainerParser):
    typed_verb = "sft"


class SFTCLI(StepRunCLI):
    """``sft``: Lightning's ``fit`` of an `SFTModule`."""

    parser_kind = _Parser
    unnamed = "sft"

    def __init__(self, args: list[str], help_about: str = "all") -> None:
        self._help_about = help_about
        with ExitStack() as self._end:
            super().__init__(SFTModule, SFTData, ["fit", *args], parser_kwargs={"prog": "grpo-pl"})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.set_defaults({"checkpoint.monitor": HELD_OUT[1]})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        order_help(parser, "sft", self._help_about)
        return parser

    def check(self) -> None:
        check_trainer(self._built.trainer)
        self._check_monitors()
        rows = self.datamodule.source
        rows.path = shipped_file(rows.path)
        derived = self.model.check(self.datamodule)
        values = {each.field: each.value for each in derived}
        values["model.policy.characters"] = self.model.policy_config.characters
        for field, value in values.items():  # so that every resume, export and server has the same ones
            self._settings[field] = value
        self.model.settings = {"rewards": [], **read_settings(self._resolved_config())["model"]}
        if self._settings.ckpt_path:
            if self._settings.resume:
                raise ValueError("give --resume or --ckpt_path, not both: --resume finds the checkpoint itself.")
            self._check_checkpoint(Path(self._settings.ckpt_path))
        for line in [*self.datamodule.notes, *([table(derived)] if derived else [])]:
            say(line)

    def _check_monitors(self) -> None:
        """Refuses to wait for a number that no validation measures, and to keep the checkpoints of the largest loss."""
        checkpoint = self._built.checkpoint
        if checkpoint.monitor is None:
            checkpoint.monitor = HELD_OUT[1]
        if checkpoint.keep_best and checkpoint.monitor != HELD_OUT[1]:
            raise ValueError(
                f"checkpoint.monitor is {checkpoint.monitor!r}, and the highest value is kept: set {HELD_OUT[1]}, "
                "which is highest where val/loss is lowest."
            )
        for callback in as_list(self._built.trainer["callbacks"]):
            if isinstance(callback, EarlyStopping) and callback.strict and callback.monitor not in HELD_OUT:
                raise ValueError(
                    f"trainer: EarlyStopping monitors {callback.monitor!r}, which no validation measures"
                    f"{nearest(callback.monitor, HELD_OUT)} ({', '.join(HELD_OUT)})."
                )

    def _check_checkpoint(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint {path}.")
        check_resume(path, self.model, self.datamodule, read_settings(self._resolved_config()), fit=True)

    def after_fit(self) -> None:
        self.model.export(self.folder.export, sft_card(self.folder))
        if is_first_process():
            print(f"{self.folder.export} is the trained model, for grpo-pl serve and as a model.policy.path.")
