"""Every argument of every class that a configuration may name is held to its type."""

import importlib
import inspect
import pkgutil
from contextlib import suppress
from typing import Any

import pytest

import grpo_pl
from grpo_pl.config.jsonargparse_adapter import Parser
from grpo_pl.config.objects import ConfigError, build
from grpo_pl.data.sources import PromptSource
from grpo_pl.environment import Environment
from grpo_pl.extras.engines.partial import PartialRollouts
from grpo_pl.objective.terms.base import Term
from grpo_pl.rewards.base import Reward
from grpo_pl.rollout.engine import RolloutEngine

PARTS: tuple[type, ...] = (Reward, PromptSource, Environment, Term, RolloutEngine, PartialRollouts)


def _kinds() -> list[type]:
    for module in pkgutil.walk_packages(grpo_pl.__path__, "grpo_pl."):
        if module.name.split(".")[1] in ("rewards", "data", "environments", "objective", "rollout"):
            with suppress(ImportError):  # of an engine whose library is not installed
                importlib.import_module(module.name)
    found, new = set[type](), set(PARTS)
    while new:
        found |= new
        new = {sub for kind in new for sub in kind.__subclasses__()} - found
    ours = [
        kind
        for kind in found
        if kind.__module__.startswith("grpo_pl.") and kind.__name__[0] != "_" and not inspect.isabstract(kind)
    ]
    return sorted(ours, key=lambda kind: (kind.__module__, kind.__qualname__))


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.__qualname__)
def test_no_argument_takes_a_value_of_any_type(kind: Any) -> None:
    parser = Parser(add_help=False)
    parser.add_class_arguments(kind, as_group=False)
    assert [a.dest for a in parser._actions if "Unvalidated" in str(getattr(a, "_typehint", ""))] == []


def test_a_weight_that_is_no_number_is_refused() -> None:
    spec = {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"weight": "heavy", "correctness": True}}
    with pytest.raises(ConfigError, match="heavy"):
        build(Reward, spec, "rewards")
