"""Modules under the names they had before: checkpoints, exports, configurations and code that name them still load."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import grpo_pl

FORMER = {
    "grpo_pl.algorithm": "grpo_pl.objective.algorithm",
    "grpo_pl.checkpoints": "grpo_pl.files.checkpoints",
    "grpo_pl.collection": "grpo_pl.training.collect",
    "grpo_pl.data.arithmetic": "grpo_pl.data.tasks.arithmetic",
    "grpo_pl.data.reasoning_gym": "grpo_pl.data.tasks.reasoning_gym",
    "grpo_pl.data.sorting": "grpo_pl.data.tasks.sorting",
    "grpo_pl.experience": "grpo_pl.training.experience",
    "grpo_pl.export": "grpo_pl.policy.export",
    "grpo_pl.loggers": "grpo_pl.callbacks.metrics_csv",
    "grpo_pl.metrics": "grpo_pl.evaluation.metrics",
    "grpo_pl.module": "grpo_pl.training.module",
    "grpo_pl.optimization": "grpo_pl.training.optimization",
    "grpo_pl.policy.cold_start": "grpo_pl.training.cold_start",
    "grpo_pl.policy.demonstrations": "grpo_pl.data.demonstrations",
    "grpo_pl.policy.reference": "grpo_pl.training.reference",
    "grpo_pl.policy.scoring": "grpo_pl.policy.logprobs",
    "grpo_pl.policy.sharding": "grpo_pl.distributed.sharding",
    "grpo_pl.rewards.answer_text": "grpo_pl.rewards.mathematics.answer_text",
    "grpo_pl.rewards.math_answer": "grpo_pl.rewards.mathematics.math_reward",
    "grpo_pl.rewards.number_lists": "grpo_pl.rewards.mathematics.number_lists",
    "grpo_pl.rewards.scoring": "grpo_pl.rewards.batch",
    "grpo_pl.rewards.second_opinion": "grpo_pl.rewards.mathematics.second_opinion",
    "grpo_pl.rollout.continuous": "grpo_pl.rollout.native.continuous",
    "grpo_pl.runs": "grpo_pl.files.runs",
    "grpo_pl.strategies": "grpo_pl.distributed.strategy",
    "grpo_pl.update": "grpo_pl.training.update",
    "serve.served": "grpo_pl.policy.trained",
}
"""Former name of a module -> its name."""


def current_name(path: str) -> str:
    """A class path, or another dotted name, with the name that its module has today; also of what ``grpo_pl`` shows."""
    module, _, name = path.rpartition(".")
    if module == "grpo_pl" and name in grpo_pl.DEFINED_IN:
        return f"{grpo_pl.DEFINED_IN[name]}.{name}"
    return f"{FORMER[module]}.{name}" if module in FORMER else FORMER.get(path, path)


class _FormerModules(MetaPathFinder, Loader):
    """Answers the import of a former name with the module of today, with one line of warning."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in FORMER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is {FORMER[spec.name]} now; the former name still works.", FutureWarning, 2)
        module = import_module(FORMER[spec.name])
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # which the import system has just replaced


def install() -> None:
    """Makes former names importable; does nothing the second time."""
    if not any(isinstance(finder, _FormerModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerModules())
