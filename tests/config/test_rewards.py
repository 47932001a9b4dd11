"""Every reward comes from YAML and goes back as plain values, and says what its arguments are."""

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import grpo_pl.rewards as rewards_module
from grpo_pl.config.objects import build
from grpo_pl.rewards import ExactReward, LengthReward, ProcessReward, Reward

NEEDED: dict[str, dict[str, Any]] = {
    "JudgeReward": {"model": "m", "base_url": "http://127.0.0.1:1/v1"},
    "ModelReward": {"model": "folder"},
    "PerSource": {"rewards": {"a": {"class_path": "grpo_pl.rewards.ExactReward"}}},
    "ProcessModelReward": {"model": "folder"},
    "RubricReward": {"model": "m", "base_url": "http://127.0.0.1:1/v1", "criteria": {"It is short.": 2.0}},
}
CLASSES = sorted(
    name
    for name in rewards_module.__all__
    if isinstance(kind := getattr(rewards_module, name), type)
    and issubclass(kind, Reward)
    and kind not in (Reward, ProcessReward)
)


@pytest.mark.parametrize("name", CLASSES)
def test_every_reward_comes_from_yaml_and_goes_back_as_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("JudgeReward", "RubricReward"):
        pytest.importorskip("openai")
    arguments = {"name": "mine", "weight": 0.5, **NEEDED.get(name, {})}
    if name == "FunctionReward":
        arguments["function"] = "tests_of_specs:f"
        monkeypatch.setitem(sys.modules, "tests_of_specs", SimpleNamespace(f=lambda completions: []))
    reward = build(Reward, {"class_path": f"grpo_pl.rewards.{name}", "init_args": arguments}, "reward")
    assert (reward.name, reward.weight) == ("mine", 0.5)
    twin = build(Reward, json.loads(json.dumps(reward.spec())), "reward")
    assert type(twin) is type(reward)
    assert twin.spec() == reward.spec()


def test_a_reward_inside_a_reward_survives_the_round_trip() -> None:
    arguments = {"shape": "cosine", "correct": {"class_path": "grpo_pl.rewards.ExactReward"}}
    reward = build(Reward, {"class_path": "grpo_pl.rewards.LengthReward", "init_args": arguments}, "reward")
    twin = build(Reward, json.loads(json.dumps(reward.spec())), "reward")
    assert isinstance(twin, LengthReward)
    assert twin.correct == ExactReward()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"class_path": "grpo_pl.rewards.NoSuch"}, "NoSuch"),
        ({"class_path": "no_such_package.Reward"}, "no_such_package"),
        ({"class_path": "pathlib.Path"}, "is no Reward"),
        ({"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"wait": 1}}, "wait"),
        ({}, "Reward"),
    ],
)
def test_specs_that_lead_nowhere_are_refused(spec: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(Reward, spec, "reward")


def test_every_argument_explains_itself() -> None:
    """The docstring under a field, or under the field of the parent that it overrides, is its help."""
    import ast
    import inspect

    fields = 0
    for name in CLASSES:
        kind = getattr(rewards_module, name)
        tree = ast.parse(inspect.getsource(kind))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for statement, follower in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and "init=False" not in ast.unparse(statement):
                field = ast.unparse(statement.target)
                is_text = isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant)
                overrides = any(field in getattr(parent, "__annotations__", ()) for parent in kind.__mro__[1:])
                assert is_text or overrides or field == "pool", f"{name}.{field} has no docstring"
                fields += 1
    assert fields > len(CLASSES)
