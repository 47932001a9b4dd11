"""What an export or a run folder of somebody else may name as a reward or a source, and what it may not."""

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import grpo_pl.rewards as rewards_module
from grpo_pl.config.objects import build, build_rewards
from grpo_pl.rewards import ExactReward, Reward
from grpo_pl.rewards.trust import SOURCES, Untrusted, check_rewards_trusted, check_source_trusted, trusted_rewards
from tests.rewards.shipped import SHIPPED

NEEDS_TRUST = {"CodeReward", "FunctionReward", "JudgeReward", "ModelReward", "ProcessModelReward", "RubricReward"}
TRUSTED = sorted(SHIPPED.keys() - NEEDS_TRUST)
EXACT = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"name": "x"}}
FUNCTION = {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": "os.getcwd"}}


def _spec(class_path: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def test_every_reward_says_whether_it_is_trusted() -> None:
    silent = [name for name, kind in SHIPPED.items() if "trusted" not in vars(kind) and name not in NEEDS_TRUST]
    assert silent == []
    assert not any(SHIPPED[name].trusted for name in NEEDS_TRUST)
    assert {path for path in trusted_rewards() if path.count(".") == 2} == {
        f"grpo_pl.rewards.{name}" for name in TRUSTED
    }


@pytest.mark.parametrize("name", TRUSTED)
def test_a_trusted_reward_has_no_argument_that_names_code_a_model_or_a_file(name: str) -> None:
    hints = typing.get_type_hints(SHIPPED[name])
    for argument in [f for f in dataclasses.fields(SHIPPED[name]) if f.init]:
        assert set(_leaves(hints[argument.name])) <= {bool, int, float, str, type(None), Reward}, argument.name
        assert not re.search("function|model|file|path|folder|url|class|module", argument.name)


def _leaves(hint: Any) -> Iterator[Any]:
    """The classes that a type is made of; ``str`` for a Literal."""
    if typing.get_origin(hint) is typing.Literal:
        yield from map(type, typing.get_args(hint))
    elif parts := typing.get_args(hint):
        for part in parts:
            yield from _leaves(part)
    else:
        yield hint


def test_a_class_is_not_trusted_because_its_parent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(ExactReward):
        pass

    monkeypatch.setattr(rewards_module, "Mine", Mine, raising=False)
    monkeypatch.setattr(rewards_module, "__all__", [*rewards_module.__all__, "Mine"])
    assert Mine.trusted and trusted_rewards.__wrapped__() == trusted_rewards()


@pytest.mark.parametrize("name", TRUSTED)
def test_a_trusted_reward_loads_by_any_of_its_names(name: str) -> None:
    kind = SHIPPED[name]
    arguments = {"rewards": {"a": EXACT}} if name == "PerSource" else {}
    for path in (f"grpo_pl.rewards.{name}", f"{kind.__module__}.{name}"):
        check_rewards_trusted([_spec(path, **arguments)])
        assert type(build(Reward, _spec(path, **arguments), "reward")) is kind


@pytest.mark.parametrize("name", ["countdown.CountdownReward", "subset_sum.SubsetSumReward"])
def test_an_export_of_version_0_2_loads_by_itself(name: str) -> None:
    (reward,) = build_rewards([_spec(f"grpo_pl.rewards.{name}", correctness=True)])
    assert type(reward) is SHIPPED[name.partition(".")[2]]
    parts = {"a": _spec(f"grpo_pl.rewards.{name}")}
    (held,) = build_rewards([_spec("grpo_pl.rewards.PerSource", rewards=parts, correctness=True)])
    assert type(held.rewards["a"]) is type(reward)  # type: ignore[attr-defined]


def test_every_source_of_ours_is_listed_where_it_is() -> None:
    for module, names in SOURCES.items():
        loaded = __import__(f"grpo_pl.data.{module}", fromlist=names)
        assert all(getattr(loaded, name).__module__ == f"grpo_pl.data.{module}" for name in names)


REFUSED = [
    *[f"grpo_pl.rewards.{name}" for name in sorted(NEEDS_TRUST)], "grpo_pl.rewards.function.FunctionReward",
    "grpo_pl.extras.judges.judge.JudgeReward", "grpo_pl.extras.judges.rubric.RubricReward",
    "grpo_pl.rewards.judge.JudgeReward", "grpo_pl.extras.judges.model.ModelReward", "grpo_pl.rewards.model.ModelReward",
    "grpo_pl.rewards.process.ProcessModelReward", "grpo_pl.extras.judges.process_model.ProcessModelReward",
    "grpo_pl.rewards.function.load_function",
    "grpo_pl.rewards.mathematics.math_reward.FunctionReward", "grpo_pl.rewards..ExactReward",
    "grpo_pl.rewards.exactreward", "grpo_pl.rewards.ExactReward ", "grpo_pl.rewards:ExactReward", "ExactReward",
    "os.system", "subprocess.Popen", "my_rewards.Mine", "", None, 5, ["grpo_pl.rewards.ExactReward"],
]  # fmt: skip


@pytest.mark.parametrize("class_path", REFUSED, ids=repr)
@pytest.mark.parametrize("depth", ["outside", "in a list", "in PerSource", "in LengthReward", "in a number", "deep"])
def test_everything_else_is_refused_by_name_wherever_it_stands(class_path: Any, depth: str) -> None:
    inner = {"class_path": class_path, "init_args": {}}
    per_source = "grpo_pl.rewards.PerSource"
    spec = {
        "outside": inner,
        "in a list": _spec("grpo_pl.rewards.ExactReward", name=[1, [inner]]),
        "in PerSource": _spec(per_source, rewards={"a": EXACT, "b": inner}),
        "in LengthReward": _spec("grpo_pl.rewards.LengthReward", correct=inner),
        "in a number": _spec("grpo_pl.rewards.ExactReward", weight={"a": {"b": inner}}),
        "deep": _spec(per_source, rewards={"a": _spec(per_source, rewards={"b": inner})}),
    }[depth]
    before = set(sys.modules)
    with pytest.raises(ValueError, match="--trust-rewards") as refusal:
        check_rewards_trusted([EXACT, spec])
    assert repr(class_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"workers": 10_000}, {"memory_limit_mb": 10**9}, {"soft_limit_s": 1e6, "hard_limit_s": 2e6},
        {"workers": "4096"}, {"workers": True}, {"workers": [1]}, {"hard_limit_s": "1e9"},
        {"hard_limit_s": float("nan")}, {"name": ExactReward}, {"name": b"bytes"}, {1: "a"},
    ],
)  # fmt: skip
def test_arguments_that_cost_too_much_or_are_not_plain_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(Untrusted, match="--trust-rewards"):
        build_rewards([{"class_path": "grpo_pl.rewards.MathReward", "init_args": arguments}])


DOTTED: list[tuple[str, dict[str, Any]]] = [
    ("LengthReward", {"correct": EXACT, "correct.class_path": "imported_by_name.X"}),
    ("LengthReward", {"correct.init_args.function": "imported_by_name.X"}),
    ("LengthReward", {"correct+": [{"class_path": "imported_by_name.X"}]}),
    ("PerSource", {"rewards": {"a": EXACT, "a.class_path": "imported_by_name.X"}}),
    ("PerSource", {"rewards.a.class_path": "imported_by_name.X"}),
    ("PerSource", {"rewards": {"a": EXACT, "a+": EXACT}}),
    ("ReasoningGymReward", {"settings": {"a.class_path": "imported_by_name.X"}}),
    ("ExactReward", {"": 1}),
    ("ExactReward", {"name ": "a"}),
]


@pytest.mark.parametrize(("name", "arguments"), DOTTED, ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_names_that_the_parser_would_take_apart_are_refused_and_nothing_is_imported(
    name: str, arguments: dict[str, Any], inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_by_name.py").write_text("class X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = _spec(f"grpo_pl.rewards.{name}", **arguments)
    with pytest.raises(Untrusted, match="--trust-rewards"):
        build_rewards([_spec("grpo_pl.rewards.PerSource", rewards={"outer": spec}) if inside else spec])
    assert "imported_by_name" not in sys.modules


NAMES_OF_FILES: list[Any] = ["further.yaml", "ExactReward", ["further.yaml"], {"a": "further.yaml"}]
LOOP: list[Any] = []
LOOP.append(LOOP)
AROUND = _spec("grpo_pl.rewards.PerSource", rewards={})
AROUND["init_args"]["rewards"]["a"] = AROUND
NO_LIST = [None, "os.system", {"class_path": "os.system"}, ["os.system"], [[EXACT]], 5]
NO_REWARDS: list[Any] = [
    # the name of a file or class where rewards are expected, which the parser of configurations would read
    *([_spec("grpo_pl.rewards.PerSource", rewards=value)] for value in NAMES_OF_FILES),
    *([_spec("grpo_pl.rewards.LengthReward", correct=value)] for value in NAMES_OF_FILES),
    [{**EXACT, "dict_kwargs": {"a": 1}}], [{**EXACT, "init_args": [1]}],  # more than class and arguments
    [_spec("grpo_pl.rewards.ExactReward", name=LOOP)], [AROUND],  # endless nesting
]  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "message"),
    [*((specs, "rewards must be a list") for specs in NO_LIST), *((specs, "--trust-rewards") for specs in NO_REWARDS)],
)
def test_what_is_no_list_of_rewards_and_plain_arguments_is_refused(specs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards_trusted(specs)


@pytest.mark.parametrize(
    "spec",
    [
        "os.system", "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", _spec("my_sources.Mine"),
        _spec("ArithmeticPrompts"), _spec("grpo_pl.data.mixture.MixturePrompts", parts={"a": _spec("my_sources.Mine")}),
        _spec("grpo_pl.data.mixture.MixturePrompts", parts={"a": "my_sources.Mine"}),
        _spec("grpo_pl.data.curriculum.CurriculumPrompts", **{"source.class_path": "imported_by_name.X"}),
        _spec("grpo_pl.data.curriculum.CurriculumPrompts", source="my_sources.Mine"),
        _spec("grpo_pl.data.curriculum.CurriculumPrompts", source=_spec("my_sources.Mine")),
    ],
    ids=str,
)  # fmt: skip
def test_a_source_that_is_not_ours_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match="--trust-rewards"):
        check_source_trusted(spec)


def test_our_sources_load_by_themselves() -> None:
    sums = _spec("grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", digits=2, seed=1)
    check_source_trusted(sums)
    check_source_trusted(_spec("grpo_pl.data.mixture.MixturePrompts", parts={"a": sums}, weights={"a": 2.0}))
    check_source_trusted(_spec("grpo_pl.data.curriculum.CurriculumPrompts", source=sums))


def test_exports_in_the_repository_need_no_trust(tmp_path: Path) -> None:
    """Every reward of the shipped configurations but those that are meant to ask."""
    import yaml

    asking = set()
    for file in sorted(Path(__file__).parents[2].glob("configs/**/*.yaml")):
        specs = ((yaml.safe_load(file.read_text()) or {}).get("model") or {}).get("rewards") or []
        try:
            check_rewards_trusted(json.loads(json.dumps(specs)))
        except ValueError:
            asking.add(file.name)
    assert asking <= {"judge.yaml", "function.yaml", "code_tiny.yaml", "preferences.yaml"}
