"""``GRPOCLI``: ``fit`` and ``validate``, as a LightningCLI that gives every ``fit`` a run folder."""

from __future__ import annotations

import errno
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.callbacks.completions import CompletionsLog
from grpo_pl.callbacks.digests import Digests
from grpo_pl.callbacks.held_out import ReportEvaluation
from grpo_pl.callbacks.progress import StageProgress
from grpo_pl.callbacks.record import KeepConfiguration
from grpo_pl.callbacks.samples import SampleTable
from grpo_pl.cli.commands import TRAINER_VERBS
from grpo_pl.cli.preflight import check_monitor, check_resume, check_start, check_trainer
from grpo_pl.cli.run_folder import (
    TRAINER_DEFAULTS,
    as_list,
    extra_callback,
    follow_launcher,
    open_run,
    replaces,
    run_callbacks,
    run_loggers,
    write_into,
)
from grpo_pl.config.jsonargparse_adapter import Parser, add_preset_option
from grpo_pl.config.objects import import_named_sources, import_shipped_sources, read, read_arguments, require_fields
from grpo_pl.config.shipped import short_name
from grpo_pl.data.datamodule import RolloutDataModule, check_shares
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.files.runs import OpenRun, RunFolder, newest_run_folder, read_settings
from grpo_pl.policy.tokenizer import FROM_DATA
from grpo_pl.processes.rank import is_first_process
from grpo_pl.training.checks import check_monitors
from grpo_pl.training.defaults import Derived, table, unset_fields
from grpo_pl.training.module import GRPOModule


class TrainerParser(Parser, LightningArgumentParser):
    """Lightning's parser, whose errors are one line, and whose help may be about a part such as ``model.sampling``."""

    help_about = "all"

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        from grpo_pl.config.suggestions import nearest

        part = self.help_about
        if part != "all":
            names = [action.dest for action in self._actions]
            inside = {name for name in names if f"{name}.".startswith(f"{part}.")}
            if not inside:
                hint = nearest(part, names)
                raise ValueError(f"--help: no option begins with {part!r}{hint}; --help all shows every one.")
            for group in self._action_groups:
                group._group_actions = [action for action in group._group_actions if action.dest in inside]
        return super().format_help(*args, **kwargs)


class RunCLI(LightningCLI):
    """A LightningCLI whose run has a folder, and which reads tensors and plain values of checkpoints alone."""

    run: OpenRun | None = None
    parser_kind = TrainerParser
    unnamed = "run"
    """Name of a run without one and without a configuration."""
    _end: ExitStack
    """What ends with the command."""

    def __init__(
        self, model: type[LightningModule], data: type[LightningDataModule], args: list[str], **more: Any
    ) -> None:
        self.verb, *_ = args
        super().__init__(
            model,
            data,
            args=args,
            save_config_callback=None,  # written into the run folder by `fit`
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=self.parser_kind,
            auto_configure_optimizers=False,  # the policy is built later, in configure_model
            load_from_checkpoint_support=False,
            **more,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning's is static
        """Only the verb that is run, as each parser takes half a second to build, with the arguments not offered."""
        loaders = {"dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {self.verb: {"model", *loaders, "weights_only", "verbose"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(RolloutCheckpoint, "checkpoint")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder that holds one folder per run.")
        parser.add_argument(
            "--name", type=str | None, default=None, help="Name of the run; by default the stem of the first --config."
        )
        parser.add_argument(
            "--resume",
            action="store_true",
            help="Go on with the newest run of that name from its last whole checkpoint, in its folder (`fit` only).",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses without Lightning's warning about ``args`` beside ``sys.argv``, which are the same here."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning would let hyperparameters inside a checkpoint win over the command line."""

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    @property
    def _settings(self) -> Any:
        """The settings of files and options, with defaults."""
        return self.config[str(self.subcommand)]

    @property
    def _built(self) -> Any:
        """The objects built from `_settings`."""
        return self.config_init[str(self.subcommand)]

    def _resolved_config(self) -> str:
        settings = self._settings.clone()
        settings["resume"] = False  # what this command does, and no setting of the run
        return str(self._parser(self.subcommand).dump(settings, skip_unset=False))

    def _name(self) -> str:
        name, configs = self._settings.name, self._settings.config
        return str((Path(str(configs[0])).stem if configs else self.unnamed) if name is None else name)

    def _claim_folder(self, config: str, *writers: Callback) -> RunFolder:
        """Opens the run's folder with its ``config``; loggers and ``writers`` write there, and a resumed run goes on
        from its checkpoint."""
        built, given = self._built, self._settings
        opened = open_run(given.runs_dir, self._name(), config=config, resume=given.resume)
        self.run = self._end.enter_context(opened)
        if self.run.checkpoint is not None:
            self._check_checkpoint(self.run.checkpoint)
            built.ckpt_path = str(self.run.checkpoint)
        built.trainer["logger"] = run_loggers(self.run.folder, as_list(built.trainer["logger"]))
        built.trainer["default_root_dir"] = str(self.run.folder.path)
        write_into(self.run.folder, writers)
        return self.run.folder

    def _check_checkpoint(self, path: Path) -> None:
        """Refuses a checkpoint that the run cannot go on from, before anything is written."""


class GRPOCLI(RunCLI):
    """``fit`` and ``validate``; every ``fit`` gets a run folder."""

    trainer_kind: type[Trainer] = Trainer

    def __init__(self, args: list[str], help_about: str = "all") -> None:
        self._help_about = help_about
        self._others: list[Logger] = []
        """Loggers that the configuration names besides our own."""
        self._given = read_arguments(args)
        import_named_sources(self._given)
        if "--help" in args:
            import_shipped_sources()
        with ExitStack() as self._end, self._given.own_objective():
            super().__init__(
                GRPOModule,
                RolloutDataModule,
                args,
                trainer_class=self.trainer_kind,
                parser_kwargs={"prog": "grpo-pl", "description": "Trains and validates on a Lightning Trainer."},
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_preset_option(parser)
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        super().add_arguments_to_parser(parser)
        parser.add_lightning_class_args(CompletionsLog, "completions")
        parser.add_lightning_class_args(SampleTable, "samples")
        parser.add_lightning_class_args(Digests, "digests")
        if (watch := extra_callback("RewardWatch")) is not None:
            parser.add_lightning_class_args(watch, "watch")
        parser.add_argument(
            "--branch",
            type=str | None,
            default=None,
            help="RUN@S: the rest of a run from step S on, changed (`fit` only).",
        )
        parser.add_argument(
            "--profile", action="store_true", help="Print where the time of a step goes, at the end of `fit`."
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        order_help(parser, subcommand, self._help_about)
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

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        # set here, not by `fit(ckpt_path=…)`: the module reads it before it makes a cold start
        self.trainer.ckpt_path = arguments.pop("ckpt_path", None)
        if subcommand == "validate":
            arguments["verbose"] = False  # our own table has the intervals as well
        return arguments

    def say(self, line: str) -> None:
        """Tells the user something before the run begins."""
        say(line)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        require_fields(self._given.trees, self._parser(args[0]).groups or ())
        super().parse_arguments(parser, args)

    def _run_subcommand(self, subcommand: str) -> None:
        if self.run is not None and self.run.note:
            self.say(self.run.note)
        try:
            super()._run_subcommand(subcommand)
        except OSError as error:
            if error.errno != errno.ENOSPC or self.run is None:
                raise
            raise OSError(error.errno, "no space left; --resume goes on once there is", self.run.folder.path) from error

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = self._built.trainer
        check_trainer(trainer)
        if self._settings.branch is not None:  # of the command line `fit` has taken it
            raise ValueError(f"branch is {self._settings.branch!r} in a file: give --branch as an option of fit.")
        word = self._settings.ckpt_path
        if word in ("last", "best", "hpc", "registry") and not Path(word).exists():
            raise ValueError(
                f"--ckpt_path is {word!r}, a word of Lightning's: give the file, as runs/NAME/checkpoints/"
                f"{'best' if word == 'best' else 'last'}.ckpt, or --resume and the name of the run."
            )
        if trainer["fast_dev_run"] is True:
            trainer["fast_dev_run"] = 2  # rollouts: the second is drawn from weights of an update
        derived = self._resolve()
        if self.model.pool is not None:
            self._end.enter_context(self.model.pool)  # which the check starts
        resumes = bool(self._settings.ckpt_path or self._settings.get("resume"))
        check_start(self.model, self.datamodule, self.say, resumes=resumes)  # before a run folder is claimed
        check_monitors(as_list(trainer["callbacks"]), self.model.validation, self.model.rewards, self.datamodule)
        if self._settings.ckpt_path:
            if self._settings.get("resume"):
                raise ValueError("give --resume or --ckpt_path, not both: --resume finds the checkpoint itself.")
            self._check_checkpoint(Path(self._settings.ckpt_path))
        bar, given = StageProgress(), as_list(trainer["callbacks"])
        shown = trainer["enable_progress_bar"] is not False and not any(replaces(bar, mine) for mine in given)
        own: list[Any] = [bar] if shown else []
        if self.subcommand == "fit":
            own += self._open_run()
        else:
            own.append(ReportEvaluation(self._settings.output, self._settings.baseline))
            trainer["logger"] = trainer["logger"] or False  # Lightning's default leaves a folder `lightning_logs`
        trainer["callbacks"] = [*as_list(trainer["callbacks"]), *own]
        follow_launcher(trainer)
        try:
            built = super().instantiate_trainer(**kwargs)
        except TypeError as error:  # what Lightning raises for a value such as devices: x
            raise ValueError(f"trainer: {error}") from error
        if self.subcommand == "fit":
            processes = built.num_devices * built.num_nodes
            check_shares(self.datamodule.prompt_count, processes)  # before the cold start
        for logger in self._others:
            logger.log_hyperparams(read_settings(self._resolved_config()))
        if derived:
            self.say(table(derived))
        return built

    def _open_run(self) -> list[Any]:
        """Claims the run's folder, writes the resolved configuration; returns the callbacks that write there."""
        built, given = self._built, self._settings
        if built.checkpoint.keep_best:
            check_monitor(built.checkpoint.monitor, self.model, self.datamodule)
        config = self._resolved_config()
        self.model.settings = read_settings(config)["model"]
        self._others = as_list(built.trainer["logger"])
        folder = self._claim_folder(config, built.checkpoint, built.completions, built.digests, built.get("watch"))
        own = []
        if given.profile:
            from grpo_pl.callbacks.profiling import StageProfile

            own.append(StageProfile())
        flags = " ".join(f"--config {short_name(Path(str(path)))}" for path in given.config or [])
        return [
            KeepConfiguration(folder, config),
            *run_callbacks(folder, f"grpo-pl validate {flags} --ckpt_path {folder.last_checkpoint}"),
            *own,
        ]

    def _resolve(self) -> list[Derived]:
        """Replaces fields that are null, and characters ``from_data``, by those of the run that is resumed, or else by
        derived ones, and returns what it derived. They stand in the resolved configuration, so that every later resume,
        export and server has the same ones."""
        from grpo_pl.training.vocabulary import with_collected_characters

        module, data = self.model, self.datamodule
        policy = module.policy_config
        unset = unset_fields(module.optimization, module.cold_start, data)
        earlier = self._earlier_run() if unset or policy.characters == FROM_DATA else None
        before = read([earlier.config]) if earlier is not None and earlier.config.is_file() else None
        values: dict[str, Any] = {}
        if before is not None:
            values = {field: value for field in unset if (value := before.get(field)) is not None}
            module.take_derived(values, data)
        derived: list[Derived] = module.derive_defaults(data)
        values |= {each.field: each.value for each in derived}
        if policy.characters == FROM_DATA:
            if before is not None:
                module.policy_config = replace(policy, characters=before.get("model.policy.characters"))
            else:
                module.policy_config = with_collected_characters(
                    policy, module.template, data, module.cold_start, module.stage, module.demonstrations
                )
            values["model.policy.characters"] = module.policy_config.characters
        for field, value in values.items():
            self._settings[field] = value
        return derived

    def _earlier_run(self) -> RunFolder | None:
        """The run whose checkpoint is resumed or measured; None for a new run."""
        if self._settings.ckpt_path:
            return RunFolder(Path(self._settings.ckpt_path).absolute().parent.parent)
        if self._settings.resume:
            return newest_run_folder(Path(self._settings.runs_dir), self._name())
        return None

    def _check_checkpoint(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint {path}.")
        config = read_settings(self._resolved_config())
        check_resume(path, self.model, self.datamodule, config, fit=self.subcommand == "fit")


def order_help(parser: LightningArgumentParser, verb: str, about: str) -> None:
    """Makes the help page of a verb, or of the part that it is ``about``; what a run is about comes before the forty
    options of the Trainer."""
    parser.usage = f"grpo-pl {verb} --config FILE [--config OVERLAY …] [--OPTION VALUE …]"
    parser.description = TRAINER_VERBS[verb]
    trainer = (parser.groups or {})["trainer"]
    trainer.title = "Lightning's Trainer"
    parser._action_groups = sorted(parser._action_groups, key=lambda group: group is trainer)
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.dest == "ckpt_path":  # Lightning's help lists forms of it that are refused here
                group.title = "checkpoint"
                action.help = "checkpoint of an earlier run: its weights, optimizer and counters are restored."
    assert isinstance(parser, TrainerParser)
    parser.help_about = about


def say(line: str) -> None:
    """Prints a line on the first process's stderr."""
    if is_first_process():
        print(line, file=sys.stderr)
