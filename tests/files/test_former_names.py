"""What was written under the names that modules had before still loads, with one line about it."""

import importlib
import subprocess
import sys
from typing import Any

import pytest

from grpo_pl.config.objects import build
from grpo_pl.files.former_names import FORMER, current_name
from grpo_pl.files.runs import config_changes
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.mathematics.math_reward import MathReward
from grpo_pl.rewards.trust import check_rewards_trusted, check_source_trusted


@pytest.mark.parametrize("former", sorted(FORMER))
def test_a_former_name_leads_to_the_module_itself(former: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(FutureWarning, match=f"{former} is {FORMER[former]} now"):
        module = importlib.import_module(former)
    assert module is sys.modules[FORMER[former]]
    assert module.__name__ == module.__spec__.name == FORMER[former]  # type: ignore[union-attr]


def test_a_former_name_is_mentioned_once() -> None:
    code = "from grpo_pl.data.sorting import SortingPrompts; from grpo_pl.data.sorting import SortingPrompts"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr.count("grpo_pl.data.sorting is grpo_pl.data.tasks.sorting now") == 1


def test_rewards_and_sources_of_an_earlier_export_are_built_and_trusted() -> None:
    spec = {"class_path": "grpo_pl.rewards.math_answer.MathReward", "init_args": {"weight": 0.5}}
    check_rewards_trusted([spec])
    check_source_trusted({"class_path": "grpo_pl.data.arithmetic.ArithmeticPrompts", "init_args": {"digits": 2}})
    reward: Any = build(Reward, spec, "reward")
    assert isinstance(reward, MathReward) and reward.weight == 0.5


def test_a_former_name_in_a_runs_configuration_is_no_change() -> None:
    def tree(path: str) -> dict[str, Any]:
        return {"data": {"source": {"class_path": path, "init_args": {"digits": 2}}}}

    before, now = "grpo_pl.data.arithmetic.ArithmeticPrompts", "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
    assert config_changes(tree(before), tree(now)) == []
    assert config_changes(tree(before), tree("my.Source")) == [f"data.source.class_path: {now} → my.Source"]
    assert current_name(now) == now
