"""Names of earlier versions: where modules and classes are now. Version 0.4 reads the old names, 0.5 refuses them."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

import grpo_pl

REFUSED_FROM = (0, 5)
"""The version that reads the names of 0.3 no more."""
CLASSES = {
    "grpo_pl.callbacks.choices.TellChoices": "grpo_pl.callbacks.summary.StartSummary",
    "grpo_pl.callbacks.configuration.KeepConfiguration": "grpo_pl.callbacks.record.KeepConfiguration",
    "grpo_pl.callbacks.doctor.callback.Doctor": "grpo_pl.extras.doctor.callback.Doctor",
    "grpo_pl.callbacks.evaluation.ReportEvaluation": "grpo_pl.callbacks.held_out.ReportEvaluation",
    "grpo_pl.callbacks.live.LiveView": "grpo_pl.extras.live.callback.LiveView",
    "grpo_pl.callbacks.report.WriteReport": "grpo_pl.extras.report.callback.WriteReport",
    "grpo_pl.callbacks.results.WriteReport": "grpo_pl.extras.report.callback.WriteReport",
    "grpo_pl.callbacks.validation.ValidateAtBothEnds": "grpo_pl.callbacks.held_out.ValidateAtBothEnds",
    "grpo_pl.callbacks.watch.RewardWatch": "grpo_pl.extras.watch.callback.RewardWatch",
    "grpo_pl.distributed.checkpoint_io.CheckpointFiles": "grpo_pl.distributed.strategy.CheckpointFiles",
    "grpo_pl.rewards.countdown.CountdownReward": "grpo_pl.rewards.number_puzzles.CountdownReward",
    "grpo_pl.rewards.number_puzzle.NumberPuzzleReward": "grpo_pl.rewards.number_puzzles.NumberPuzzleReward",
    "grpo_pl.rewards.subset_sum.SubsetSumReward": "grpo_pl.rewards.number_puzzles.SubsetSumReward",
    "grpo_pl.rollout.copying.CopyEngine": "grpo_pl.extras.engines.copy_engine.CopyEngine",
    "grpo_pl.rewards.process.ProcessModelReward": "grpo_pl.extras.judges.process_model.ProcessModelReward",
    "grpo_pl.training.carried.PartialRollouts": "grpo_pl.training.partial_rollouts.PartialRollouts",
}
"""Class path that version 0.2 or 0.3 wrote or documented, of a class that did not move with its whole module -> where
the class is now."""
MODULES = {
    "grpo_pl.callbacks.renewal": "grpo_pl.extras.preferences.renewal",
    "grpo_pl.callbacks.results": "grpo_pl.callbacks.export",
    "grpo_pl.cli.commands.agent": "grpo_pl.extras.agents.command",
    "grpo_pl.cli.commands.compare": "grpo_pl.extras.compare.command",
    "grpo_pl.cli.commands.demo": "grpo_pl.extras.live.command",
    "grpo_pl.cli.commands.new": "grpo_pl.extras.scaffold.command",
    "grpo_pl.cli.commands.plan": "grpo_pl.extras.plan.command",
    "grpo_pl.cli.commands.report": "grpo_pl.extras.report.command",
    "grpo_pl.cli.doctor": "grpo_pl.extras.doctor.command",
    "grpo_pl.cli.reward_model": "grpo_pl.extras.preferences.command",
    "grpo_pl.data.environment_tasks": "grpo_pl.extras.agents.environment_tasks",
    "grpo_pl.data.preferences": "grpo_pl.extras.preferences.pairs",
    "grpo_pl.environments": "grpo_pl.extras.agents",
    "grpo_pl.environments.base": "grpo_pl.environment",
    "grpo_pl.functional.preferences": "grpo_pl.extras.preferences.loss",
    "grpo_pl.policy.teacher_server": "grpo_pl.extras.teachers.server",
    "grpo_pl.policy.tool_form": "grpo_pl.extras.agents.tool_form",
    "grpo_pl.report": "grpo_pl.extras.report",
    "grpo_pl.report.model_card": "grpo_pl.evaluation.model_card",
    "grpo_pl.rewards.endpoint": "grpo_pl.extras.judges.endpoint",
    "grpo_pl.rewards.judge": "grpo_pl.extras.judges.judge",
    "grpo_pl.rewards.model": "grpo_pl.extras.judges.model",
    "grpo_pl.rewards.pretrained": "grpo_pl.policy.pretrained",
    "grpo_pl.rewards.programs": "grpo_pl.extras.code",
    "grpo_pl.rewards.rubric": "grpo_pl.extras.judges.rubric",
    "grpo_pl.rewards.sandbox.program_filter": "grpo_pl.extras.code.program_filter",
    "grpo_pl.rewards.sandbox.program_isolation": "grpo_pl.extras.code.program_isolation",
    "grpo_pl.rewards.sandbox.program_judge": "grpo_pl.extras.code.program_judge",
    "grpo_pl.rewards.sandbox.program_run": "grpo_pl.extras.code.program_run",
    "grpo_pl.rollout.child": "grpo_pl.extras.engines.child",
    "grpo_pl.rollout.copy_engine": "grpo_pl.extras.engines.copy_engine",
    "grpo_pl.rollout.episode_rows": "grpo_pl.extras.agents.episode_rows",
    "grpo_pl.rollout.episodes": "grpo_pl.extras.agents.episodes",
    "grpo_pl.rollout.native.child": "grpo_pl.extras.engines.native_child",
    "grpo_pl.rollout.native.decode_kernel": "grpo_pl.extras.kernels.decode_kernel",
    "grpo_pl.rollout.native.kernel_slots": "grpo_pl.extras.kernels.kernel_slots",
    "grpo_pl.rollout.partial": "grpo_pl.extras.engines.partial_completions",
    "grpo_pl.rollout.ray": "grpo_pl.extras.engines.ray",
    "grpo_pl.rollout.vllm": "grpo_pl.extras.engines.vllm",
    "grpo_pl.tools.comparison": "grpo_pl.extras.compare.comparison",
    "grpo_pl.tools.doctor": "grpo_pl.extras.doctor",
    "grpo_pl.tools.live": "grpo_pl.extras.live.callback",
    "grpo_pl.tools.memory": "grpo_pl.extras.plan.memory",
    "grpo_pl.tools.plan": "grpo_pl.extras.plan.workload",
    "grpo_pl.tools.scaffold": "grpo_pl.extras.scaffold",
    "grpo_pl.tools.skeletons": "grpo_pl.extras.watch.skeletons",
    "grpo_pl.tools.watch": "grpo_pl.extras.watch.callback",
    "grpo_pl.training.plain_samples": "grpo_pl.extras.engines.plain_samples",
    "grpo_pl.training.prefetch": "grpo_pl.extras.engines.prefetched",
    "grpo_pl.training.reward_model": "grpo_pl.extras.preferences.reward_model",
}
"""Module or package of version 0.3 -> where it is now, with all that it holds."""

GONE = {"grpo_pl.tools"}
"""Packages of version 0.3 of which every module has a place of its own now."""


def current_name(path: str) -> str:
    """A dotted name of a class or module as it is now; other names unchanged."""
    if path in CLASSES:
        return CLASSES[path]
    before, colon, rest = path.partition(":")  # of a function, `module:name`
    rest = colon + rest
    while before and before not in MODULES:
        before, _, last = before.rpartition(".")
        rest = f".{last}{rest}"
    return MODULES[before] + rest if before else path


def read_name(path: str) -> str:
    """`current_name` of what a user, a configuration, an export or a checkpoint names; an old name is told of once.

    Raises:
        ImportError: this version does not read old names.
    """
    now = current_name(path)
    if now != path:
        _tell(path, now)
    return now


def defined_name(path: str) -> str:
    """``grpo_pl.GRPOModule``, or the path of an earlier version, with the module that defines the class now, as
    configurations are compared; other names unchanged."""
    path = current_name(path)
    module, _, name = path.rpartition(".")
    defined = grpo_pl.DEFINED_IN.get(name) if module == "grpo_pl" else None
    return f"{defined}.{name}" if defined else path


@cache
def _tell(old: str, now: str) -> None:
    if tuple(map(int, grpo_pl.__version__.split(".")[:2])) >= REFUSED_FROM:
        raise ImportError(f"{old} is {now} now.", name=old)
    print(f"{old} is {now} now; version 0.5 will not read the old name.", file=sys.stderr)


class _Loader:
    """Puts the module of the new name in the place of the old one."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in GONE:  # nothing is in it any more but modules that have moved
            module.__path__ = []
        else:
            sys.modules[name] = import_module(read_name(name))


def spec_of_earlier(name: str) -> ModuleSpec | None:
    """What imports a module by the name of an earlier version; None for other names."""
    if current_name(name) == name and name not in GONE:
        return None
    return ModuleSpec(name, _Loader(), is_package=True)  # type: ignore[arg-type]
