"""``GRPOCLI``: the verbs that need a Trainer, as a LightningCLI with a folder of its own for every run."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.callbacks.choices import TellChoices
from grpo_pl.callbacks.completions import CompletionsLog
from grpo_pl.callbacks.configuration import KeepConfiguration
from grpo_pl.callbacks.evaluation import ReportEvaluation
from grpo_pl.callbacks.export import ExportPolicy
from grpo_pl.callbacks.metrics_csv import EventFiles, MetricsCSV
from grpo_pl.callbacks.profiling import StageProfile
from grpo_pl.callbacks.progress import StageProgress
from grpo_pl.callbacks.report import WriteReport
from grpo_pl.callbacks.samples import SampleTable
from grpo_pl.callbacks.signal_watch import SignalWatch
from grpo_pl.callbacks.summary import ClosingTable
from grpo_pl.callbacks.termination import StopOnSignal
from grpo_pl.callbacks.validation import ValidateAtBothEnds
from grpo_pl.callbacks.watch import RewardWatch
from grpo_pl.cli.commands import TRAINER_VERBS
from grpo_pl.cli.preflight import check_monitor, check_start, check_trainer
from grpo_pl.cli.resuming import check_resume
from grpo_pl.config.jsonargparse_adapter import Parser, subclasses_allowed
from grpo_pl.config.objects import import_shipped_sources, own_classes, read_tree, require_fields
from grpo_pl.config.shipped import short_name, values_of
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.checkpoint_io import CheckpointFiles
from grpo_pl.distributed.strategy import FSDP2Strategy, is_first_process, launched_devices
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.files.locks import FolderLock
from grpo_pl.files.runs import RunFolder, check_name, newest_run_folder, resume_run, start_run
from grpo_pl.policy.tokenizer import FROM_DATA
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.vocabulary import with_collected_characters

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,  # a run is one pass over `data.steps` rollouts
    "val_check_interval": 50,  # rollouts
    "check_val_every_n_epoch": None,  # count rollouts of the run, which may be fewer than the interval
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "inference_mode": False,  # its tensors cannot enter a later backward pass
    "use_distributed_sampler": False,  # the data module cuts by rank itself
    "enable_model_summary": False,
}


class TrainerParser(Parser, LightningArgumentParser):
    """Lightning's parser, which says in one line what is wrong."""


class GRPOCLI(LightningCLI):
    """``fit`` and ``validate``, with a run folder of one's own for every ``fit``."""

    def __init__(self, args: list[str]) -> None:
        self.folder: RunFolder | None = None
        self._note = ""
        self._others: list[Logger] = []
        """Loggers that the configuration names besides our own."""
        self._lock: FolderLock | None = None
        import_shipped_sources()
        files = [Path(value) for value in values_of(args, "--config")]
        self._trees = [read_tree(file) for file in files if file.is_file()]  # the parser names those that are not
        try:
            with subclasses_allowed(*own_classes(self._trees, args)):
                self._run_cli(args)
        finally:
            if self._lock is not None:
                self._lock.release()

    def _run_cli(self, args: list[str]) -> None:
        super().__init__(
            GRPOModule,
            RolloutDataModule,
            args=args,
            save_config_callback=None,  # written into the run folder by `fit`
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=TrainerParser,
            parser_kwargs={"prog": "grpo-pl", "description": "Trains and validates on a Lightning Trainer."},
            auto_configure_optimizers=False,  # the policy is built later, in configure_model
            load_from_checkpoint_support=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
            "validate": {"model", "dataloaders", "datamodule", "weights_only", "verbose"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.add_lightning_class_args(RolloutCheckpoint, "checkpoint")
        parser.add_lightning_class_args(CompletionsLog, "completions")
        parser.add_lightning_class_args(SampleTable, "samples")
        parser.add_lightning_class_args(RewardWatch, "watch")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder that holds one folder per run.")
        parser.add_argument(
            "--name", type=str | None, default=None, help="Name of the run; by default the stem of the first --config."
        )
        parser.add_argument(
            "--profile", action="store_true", help="Print where the time of a step goes, at the end of `fit`."
        )
        parser.add_argument(
            "--resume",
            action="store_true",
            help="Go on with the newest run of that name from its last whole checkpoint, in its folder (`fit` only).",
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self._order_help(parser, subcommand)
        if subcommand == "validate":
            parser.add_argument(
                "--output", type=Path | None, default=None, help="JSON file for the metrics, problem by problem."
            )
            parser.add_argument(
                "--baseline",
                type=Path | None,
                default=None,
                help="Such a file of another policy; prints the paired difference to it with its interval.",
            )
        return parser

    @staticmethod
    def _order_help(parser: LightningArgumentParser, subcommand: str) -> None:
        """On the help page, what a run is about comes before the forty options of the Trainer."""
        parser.usage = f"grpo-pl {subcommand} --config FILE [--config OVERLAY …] [--OPTION VALUE …]"
        parser.description = TRAINER_VERBS[subcommand]
        trainer = (parser.groups or {})["trainer"]
        trainer.title = "Lightning's Trainer"
        parser._action_groups = sorted(parser._action_groups, key=lambda group: group is trainer)
        for group in parser._action_groups:
            for action in group._group_actions:
                if action.dest == "ckpt_path":  # of `Trainer.fit`, of whose places to find one ours knows files only
                    group.title = "checkpoint"
                    action.help = "checkpoint of an earlier run: its weights, optimizer and counters are gone on with."

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Checkpoints are read as tensors and plain values, whatever they contain."""
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        # told now, not by `fit(ckpt_path=…)`: the module asks the trainer before it makes a cold start
        self.trainer.ckpt_path = arguments.pop("ckpt_path", None)
        if subcommand == "validate":
            arguments["verbose"] = False  # our own table has the intervals as well
        return {**arguments, "weights_only": True}

    def _parse_ckpt_path(self) -> None:
        """Lightning would let hyperparameters inside a checkpoint win over the command line; here they do not."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Lightning warns about ``args`` beside ``sys.argv``; here they are the same."""
        require_fields(self._trees, self._parser(args[0]).groups or ())
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        with self._no_trace_of_a_failed_start():
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        if self._note:
            _say(self._note)
        with self._no_trace_of_a_failed_start():
            try:
                super()._run_subcommand(subcommand)
            except OSError as error:
                if error.errno != errno.ENOSPC or self.folder is None:
                    raise
                raise OSError(error.errno, "no space left; --resume goes on once there is", self.folder.path) from error

    @contextmanager
    def _no_trace_of_a_failed_start(self) -> Iterator[None]:
        """A run that ended before it measured or saved anything leaves no folder, so the next keeps the name."""
        try:
            yield
        except BaseException:
            if self.folder is not None:
                self.folder.discard_if_unused()
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        check_trainer(self._get(self.config_init, "trainer"))
        self._resolve_characters()
        check_start(self.model, self.datamodule, _say)  # before a run folder is claimed
        callbacks = self._get(self.config_init, "trainer")["callbacks"] or []
        shown = self._get(self.config_init, "trainer")["enable_progress_bar"] is not False
        extra: list[Any] = [StageProgress()] if shown else []
        if self.subcommand == "fit":
            extra += self._open_run()
        if self.subcommand == "validate":
            given = self._get(self.config, "ckpt_path")
            if given and Path(given).exists():
                self._check_checkpoint(Path(given))
            extra.append(ReportEvaluation(self._get(self.config, "output"), self._get(self.config, "baseline")))
        trainer = self._get(self.config_init, "trainer")
        if self.subcommand != "fit" and trainer["logger"] is None:
            trainer["logger"] = False  # Lightning's default leaves a folder `lightning_logs`
        trainer["callbacks"] = [*callbacks, *extra]
        self._follow_launcher(trainer)
        if not isinstance(trainer["strategy"], FSDP2Strategy):  # which brings its own
            given = trainer["plugins"]
            trainer["plugins"] = [*(given if isinstance(given, list) else [given] if given else []), CheckpointFiles()]
        try:
            built = super().instantiate_trainer(**kwargs)
        except TypeError as error:  # what Lightning raises for a value such as devices: x
            raise ValueError(f"trainer: {error}") from error
        for logger in self._others:
            logger.log_hyperparams(yaml.safe_load(self._resolved_config()))
        return built

    @staticmethod
    def _follow_launcher(trainer: Any) -> None:
        """One configuration for any number of processes: as many devices as torchrun or SLURM started."""
        if trainer["devices"] == "auto":
            trainer["devices"], nodes = launched_devices()
            trainer["num_nodes"] = max(trainer["num_nodes"], nodes)

    def _open_run(self) -> list[Any]:
        """Claims the run's folder, writes the resolved configuration, and says what is kept there."""
        checkpoint = self._get(self.config_init, "checkpoint")
        if checkpoint.keep_best:
            check_monitor(checkpoint.monitor, self.model, self.datamodule)
        configs = self._configs()
        root, name = Path(self._get(self.config, "runs_dir")), self._name()
        resume = self._get(self.config, "resume")
        check_name(name)
        checkpoint_path = self._get(self.config, "ckpt_path")
        if resume and checkpoint_path:
            raise ValueError("give --resume or --ckpt_path, not both: --resume finds the checkpoint itself.")
        if checkpoint_path and not Path(checkpoint_path).exists():
            raise CheckpointError(f"there is no checkpoint {checkpoint_path}.")
        if checkpoint_path:
            self._check_checkpoint(Path(checkpoint_path))
        first = is_first_process()
        run = (resume_run if resume else start_run)(root, name, self._resolved_config(), first=first)
        self._lock = run.lock
        folder = run.folder
        self.folder, self._note = (folder, run.note) if first else (None, "")
        if run.checkpoint is not None:
            self.config_init[str(self.subcommand)]["ckpt_path"] = str(run.checkpoint)
            self._check_checkpoint(run.checkpoint)
        trainer = self._get(self.config_init, "trainer")
        given = trainer["logger"]
        self._others = given if isinstance(given, list) else [] if given in (None, True, False) else [given]
        trainer["logger"] = [MetricsCSV(folder.metrics), EventFiles(folder.path), *self._others]
        trainer["default_root_dir"] = str(folder.path)
        checkpoint.folder = folder.checkpoints
        self._get(self.config_init, "completions").path = folder.completions
        self._get(self.config_init, "watch").path = folder.suspicious
        flags = " ".join(f"--config {path}" for path in configs)
        return [
            StopOnSignal(),
            TellChoices(),
            SignalWatch(),
            KeepConfiguration(folder, self._resolved_config()),
            ValidateAtBothEnds(),
            ExportPolicy(folder.export),
            WriteReport(folder),
            ClosingTable(folder, flags),
            *([StageProfile()] if self._get(self.config, "profile") else []),
        ]

    def _configs(self) -> list[str]:
        return [short_name(Path(str(path))) for path in self._get(self.config, "config") or []]

    def _name(self) -> str:
        given, configs = self._get(self.config, "name"), self._configs()
        return str((Path(configs[0]).stem if configs else "run") if given is None else given)

    def _resolve_characters(self) -> None:
        """``from_data`` becomes the characters of the run that is gone on with, or of the data, for good: the resolved
        configuration names them, and with it every export and server."""
        policy = self.model.policy_config
        if policy.characters != FROM_DATA:
            return
        earlier = self._earlier_run()
        if earlier is not None and earlier.config.is_file():
            before = (yaml.safe_load(earlier.config.read_text()) or {}).get("model", {}).get("policy") or {}
            settled = replace(policy, characters=before.get("characters"))
        else:
            settled = with_collected_characters(policy, self.model.template, self.datamodule, self.model.cold_start)
        self.model.policy_config = settled
        self._get(self.config, "model").policy.characters = settled.characters

    def _earlier_run(self) -> RunFolder | None:
        """The run whose checkpoint is gone on with or measured, if it is known where that lies."""
        checkpoint = self._get(self.config, "ckpt_path")
        if checkpoint:
            return RunFolder(Path(checkpoint).absolute().parent.parent)
        if self._get(self.config, "resume"):
            return newest_run_folder(Path(self._get(self.config, "runs_dir")), self._name())
        return None

    def _check_checkpoint(self, path: Path) -> None:
        config = yaml.safe_load(self._resolved_config())
        check_resume(path, self.model, self.datamodule, config, fit=self.subcommand == "fit")

    def _resolved_config(self) -> str:
        parser = self._parser(self.subcommand)
        return str(parser.dump(self.config[str(self.subcommand)], skip_none=False))


def _say(line: str) -> None:
    if is_first_process():
        print(line, file=sys.stderr)
