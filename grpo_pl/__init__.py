"""GRPO and its relatives on PyTorch Lightning: train language models to reason with verifiable rewards.

Everything in ``__all__`` can be imported from here and is loaded when it is first asked for: ``import grpo_pl`` alone
costs no torch. ``docs/python.md`` has a whole training in Python.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time the table below counts
    from grpo_pl import functional as functional
    from grpo_pl import rewards as rewards
    from grpo_pl.callbacks.checkpoint import RolloutCheckpoint as RolloutCheckpoint
    from grpo_pl.callbacks.completions import CompletionsLog as CompletionsLog
    from grpo_pl.callbacks.export import ExportPolicy as ExportPolicy
    from grpo_pl.callbacks.profiling import StageProfile as StageProfile
    from grpo_pl.callbacks.samples import SampleTable as SampleTable
    from grpo_pl.cli.preflight import check_start as check_start
    from grpo_pl.cli.run_folder import open_run as open_run
    from grpo_pl.cli.run_folder import trainer_arguments as trainer_arguments
    from grpo_pl.data.datamodule import RolloutDataModule as RolloutDataModule
    from grpo_pl.data.demonstration_rows import DemonstrationRows as DemonstrationRows
    from grpo_pl.data.sources import PromptSource as PromptSource
    from grpo_pl.distributed.strategy import FSDP2Strategy as FSDP2Strategy
    from grpo_pl.environment import Environment as Environment
    from grpo_pl.evaluation.held_out import Validation as Validation
    from grpo_pl.extras.report.callback import WriteReport as WriteReport
    from grpo_pl.extras.watch.callback import RewardWatch as RewardWatch
    from grpo_pl.files.runs import RunFolder as RunFolder
    from grpo_pl.objective.algorithm import GRPOAlgorithm as GRPOAlgorithm
    from grpo_pl.objective.custom import AdvantageEstimator as AdvantageEstimator
    from grpo_pl.objective.custom import SurrogateObjective as SurrogateObjective
    from grpo_pl.policy.loading import PolicyConfig as PolicyConfig
    from grpo_pl.policy.lora import Lora as Lora
    from grpo_pl.policy.teacher import TeacherConfig as TeacherConfig
    from grpo_pl.policy.template import PromptTemplate as PromptTemplate
    from grpo_pl.policy.trained import find_model as find_model
    from grpo_pl.rewards.base import Reward as Reward
    from grpo_pl.rewards.base import Score as Score
    from grpo_pl.rollout.engine import RolloutEngine as RolloutEngine
    from grpo_pl.rollout.native.engine import NativeEngine as NativeEngine
    from grpo_pl.rollout.plain import PlainEngine as PlainEngine
    from grpo_pl.training.cold_start import ColdStart as ColdStart
    from grpo_pl.training.experience import Experience as Experience
    from grpo_pl.training.hooks import StepCallback as StepCallback
    from grpo_pl.training.module import GRPOModule as GRPOModule
    from grpo_pl.training.optimization import Optimization as Optimization
    from grpo_pl.training.sft_module import SFTData as SFTData
    from grpo_pl.training.sft_module import SFTModule as SFTModule
    from grpo_pl.types import GenerateRequest as GenerateRequest
    from grpo_pl.types import Problem as Problem
    from grpo_pl.types import PromptBatch as PromptBatch
    from grpo_pl.types import Rollout as Rollout
    from grpo_pl.types import SamplingParams as SamplingParams

__version__ = "0.4.0.dev0"

DEFINED_IN = {
    # what a training is made of
    "GRPOModule": "grpo_pl.training.module",
    "RolloutDataModule": "grpo_pl.data.datamodule",
    "SFTModule": "grpo_pl.training.sft_module",
    "SFTData": "grpo_pl.training.sft_module",
    "DemonstrationRows": "grpo_pl.data.demonstration_rows",
    "PolicyConfig": "grpo_pl.policy.loading",
    "Lora": "grpo_pl.policy.lora",
    "TeacherConfig": "grpo_pl.policy.teacher",
    "PromptTemplate": "grpo_pl.policy.template",
    "GRPOAlgorithm": "grpo_pl.objective.algorithm",
    "AdvantageEstimator": "grpo_pl.objective.custom",
    "SurrogateObjective": "grpo_pl.objective.custom",
    "SamplingParams": "grpo_pl.types",
    "Optimization": "grpo_pl.training.optimization",
    "ColdStart": "grpo_pl.training.cold_start",
    "Validation": "grpo_pl.evaluation.held_out",
    "FSDP2Strategy": "grpo_pl.distributed.strategy",
    # its run folder
    "open_run": "grpo_pl.cli.run_folder",
    "trainer_arguments": "grpo_pl.cli.run_folder",
    "check_start": "grpo_pl.cli.preflight",
    "RunFolder": "grpo_pl.files.runs",
    "RolloutCheckpoint": "grpo_pl.callbacks.checkpoint",
    "CompletionsLog": "grpo_pl.callbacks.completions",
    "SampleTable": "grpo_pl.callbacks.samples",
    "RewardWatch": "grpo_pl.extras.watch.callback",
    "ExportPolicy": "grpo_pl.callbacks.export",
    "WriteReport": "grpo_pl.extras.report.callback",
    "StageProfile": "grpo_pl.callbacks.profiling",
    "StepCallback": "grpo_pl.training.hooks",
    "find_model": "grpo_pl.policy.trained",
    # problems
    "PromptSource": "grpo_pl.data.sources",
    "Problem": "grpo_pl.types",
    # rewards, and what is played over many turns
    "Reward": "grpo_pl.rewards.base",
    "Score": "grpo_pl.rewards.base",
    "Environment": "grpo_pl.environment",
    # what flows between the stages of a step, and engines
    "PromptBatch": "grpo_pl.types",
    "Rollout": "grpo_pl.types",
    "GenerateRequest": "grpo_pl.types",
    "Experience": "grpo_pl.training.experience",
    "RolloutEngine": "grpo_pl.rollout.engine",
    "NativeEngine": "grpo_pl.rollout.native.engine",
    "PlainEngine": "grpo_pl.rollout.plain",
}
"""Public name -> the module that defines it."""
_PACKAGES = ("functional", "rewards")

__all__ = [*DEFINED_IN, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in DEFINED_IN:
        value = getattr(import_module(DEFINED_IN[name]), name)
    elif name in _PACKAGES:
        value = import_module(f"grpo_pl.{name}")
    else:
        raise AttributeError(f"module 'grpo_pl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _EarlierModules:
    """Finds modules by the names that they had in an earlier version."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("grpo_pl.") or name == "grpo_pl.moved":
            return None
        return import_module("grpo_pl.moved").spec_of_earlier(name)


sys.meta_path.insert(0, _EarlierModules)  # first: an old folder may be left behind, with nothing in it
