"""``grpo-pl doctor``: the checks of a start and a short probe on a copy of the run that is thrown away."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from itertools import islice
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from grpo_pl.callbacks.progress import StageProgress
from grpo_pl.cli.preflight import check_monitor, check_start, check_trainer, prompt_encoding
from grpo_pl.cli.run_folder import follow_launcher
from grpo_pl.cli.trainer import GRPOCLI, say
from grpo_pl.config.jsonargparse_adapter import USAGE_ERROR
from grpo_pl.config.objects import ConfigError
from grpo_pl.extras.doctor.answers import measure_answers
from grpo_pl.extras.doctor.fixes import with_fixes
from grpo_pl.extras.doctor.probe import Probe, ProbeTrainer, lines_of
from grpo_pl.extras.doctor.problems import measure_problems, training_problems
from grpo_pl.extras.doctor.rollouts import run_settings
from grpo_pl.extras.doctor.rules import findings
from grpo_pl.extras.doctor.run_statistics import MIN_ROLLOUTS, Finding, RunStatistics
from grpo_pl.files.runs import RunFolder
from grpo_pl.policy.loading import load_tokenizer
from grpo_pl.processes.rank import is_first_process
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.types import Problem

REFUSED = "D00"
"""Code of what ``fit`` refuses for a reason that no rule has measured."""
EXPLAINED = frozenset({"D20", "D21", "D23", "D30"})
"""Findings for which ``fit`` may refuse to start although it could be probed."""
MOST_PROBLEMS = 100_000


class DoctorCLI(GRPOCLI):
    """``doctor``: reads all that ``fit`` reads, and leaves nothing behind but a cold start in the cache."""

    trainer_kind = ProbeTrainer
    status = 0
    """Exit status: 0 without a finding, 1 with findings; 2, as for every mistake, where nothing could be looked at."""
    looking = False
    """The parts of the run were built."""
    refusal = ""
    """The reason for which ``fit`` would not start."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--rollouts", type=int, default=4, help=f"Rollouts of the probe, {MIN_ROLLOUTS} or more.")
        parser.add_argument("--seconds", type=float, default=300.0, help="The probe ends after so many seconds.")
        parser.add_argument("--json", action="store_true", help="Print findings and figures as JSON.")

    def instantiate_classes(self) -> None:
        """Values that the parts of a run refuse are a finding."""
        try:
            super().instantiate_classes()
        except ConfigError:
            raise
        except ValueError as error:
            if self.looking:
                raise
            self.refusal = str(error)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        given, built, module, data = self._settings, self._built, self.model, self.datamodule
        self.looking = True
        if given.rollouts < MIN_ROLLOUTS or not given.seconds > 0.0:
            raise ValueError(
                f"need --rollouts >= {MIN_ROLLOUTS} and --seconds > 0, got {given.rollouts} and {given.seconds}."
            )
        if given.resume:
            raise ValueError("--resume: the doctor looks at the start of a run, not at one that goes on.")
        check_trainer(built.trainer)
        self._resolve()
        if module.pool is not None:
            self._end.enter_context(module.pool)
        module.tokenizer = load_tokenizer(module.policy_config)
        cold = "" if module.cold_start is None else " after the cold start, which is kept for the run"
        say(f"The doctor draws {given.rollouts} rollouts{cold}, for {given.seconds:g} s at most (--seconds).")
        self.probe = Probe(given.rollouts, given.seconds)
        try:
            _, fits, _ = prompt_encoding(module, module.tokenizer)
            self.probe.found = measure_problems(module, data, fits)  # before problems are left out
            check_start(module, data, say)
            if built.checkpoint.keep_best:
                check_monitor(built.checkpoint.monitor, module, data)
        except ValueError as error:
            self.refusal = str(error)
        if module.pool is None:
            try:
                self.probe.known = measure_answers(module, self._problems(), data.source)
            except ValueError:
                if not self.refusal:
                    raise
        self._parser("doctor").callback_keys.clear()  # those that write into a run's folder
        bars = [StageProgress()] if built.trainer["enable_progress_bar"] is not False else []
        changed = {
            "logger": False,
            "enable_checkpointing": False,
            "limit_val_batches": 0,
            "limit_train_batches": given.rollouts,
            "default_root_dir": self._end.enter_context(tempfile.TemporaryDirectory()),
            "callbacks": [self.probe, *bars],
        }
        for name, value in changed.items():
            built.trainer[name] = value
        follow_launcher(built.trainer)
        return LightningCLI.instantiate_trainer(self, **kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        if not self.looking:
            self._print([refused_start(self.refusal)], None, 0.0)
            return
        probe, module, data = self.probe, self.model, self.datamodule
        before = RunStatistics(
            settings=run_settings(module, data),
            problems=probe.found,
            answers=probe.known,
        )
        why, explained = self.refusal, any(one.code in EXPLAINED for one in findings(before))
        if (explained or not why) and not (probe.found and probe.found.too_long == probe.found.prompts):
            why = self._probe(subcommand) or why
        statistics = probe.result or before
        found = [*([refused_start(why)] if why and not explained else []), *findings(statistics)]
        found = with_fixes(found, module, self._problems(), data.source)
        self._print(found, statistics, probe.elapsed)
        if probe.timed_out and len(statistics.rollouts) < MIN_ROLLOUTS:
            say("The time was up before enough was seen: raise --seconds, or lower data.prompts_per_step.")
            self.status = self.status or USAGE_ERROR

    def _problems(self) -> list[Problem]:
        return list(islice(training_problems(self.datamodule), MOST_PROBLEMS))

    def _probe(self, subcommand: str) -> str:
        """Makes the rollouts; returns what ended them, where a user can mend it."""
        try:
            super()._run_subcommand(subcommand)
        except RolloutInterrupted:
            if not self.probe.timed_out:
                raise
        except ValueError as error:
            return str(error)
        return ""

    def _print(self, found: list[Finding], statistics: RunStatistics | None, seconds: float) -> None:
        self.status = int(bool(found))
        rollouts = () if statistics is None else statistics.rollouts
        shown = self.probe.shown if self.looking else []
        if not is_first_process():
            return
        if self._settings.json:
            report = {"findings": list(map(asdict, found)), "signs": None if statistics is None else asdict(statistics)}
            print(json.dumps({**report, "shown": shown, "seconds": round(seconds, 1)}, indent=2))
        else:
            count = f"{len(found) or 'no'} finding{'s' * (len(found) != 1)}"
            looked = f"{len(rollouts)} rollouts with {sum(rollout.completions for rollout in rollouts)} completions"
            said = [one.with_fix() for one in found]
            print("\n".join([*lines_of(shown), *said, f"{count}: {looked} in {seconds:.0f} s."]))

    def _earlier_run(self) -> RunFolder | None:
        return None


def refused_start(line: str) -> Finding:
    """The error of ``fit`` as a finding."""
    return Finding(REFUSED, "refused", 0.0, f"fit does not start: {line}", "what it says")
