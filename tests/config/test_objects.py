"""From YAML, options and plain values to objects: what wins, what is refused, and that ``fit`` reads alike."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.config.objects import ConfigError, build, read
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rewards import ExactReward, FormatReward, MathReward, PerSource, RepetitionReward
from grpo_pl.rewards.base import Reward
from grpo_pl.types import SamplingParams

ARITHMETIC = {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 3, "seed": 5}}


@dataclass(frozen=True, kw_only=True)
class OwnAlgorithm(GRPOAlgorithm):
    """A subclass with a field of its own."""

    extra: float = 0.5
    """A number."""


OWN = f"{__name__}.OwnAlgorithm"
EXTRA = "--model.algorithm.extra=2"


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """``config(tree, tree, …, options=[…])``: these trees as files, read in their order."""

    def from_trees(*trees: Any, options: tuple[str, ...] = ()) -> Any:
        files = [tmp_path / f"{number}.yaml" for number in range(len(trees))]
        for file, tree in zip(files, trees, strict=True):
            file.write_text(yaml.safe_dump(tree))
        return read(files, options)

    return from_trees


def source(value: Any) -> dict[str, Any]:
    return {"data": {"source": value}}


# --- what wins ------------------------------------------------------------------------------------------------------


def test_later_files_win_over_earlier_ones_and_options_over_files(config: Any) -> None:
    sampling = [{"model": {"sampling": fields}} for fields in ({"temperature": 0.5, "stop": ["a"]}, {"temperature": 2})]
    found = config(*sampling, options=("--model.sampling.max_completion_length=9",))
    expected = SamplingParams(temperature=2.0, stop=("a",), max_completion_length=9)
    assert found.build("model.sampling", SamplingParams) == expected
    assert found.settings("model.sampling", SamplingParams).temperature == 2.0


def test_fields_of_the_same_class_are_merged_and_those_of_another_forgotten(config: Any) -> None:
    merged = config(source(ARITHMETIC), source({"init_args": {"digits": 2}}))
    assert merged.build("data.source", PromptSource) == ArithmeticPrompts(digits=2, seed=5)
    by_file = config(source(ARITHMETIC), source({"class_path": "grpo_pl.data.tasks.sorting.SortingPrompts"}))
    by_option = config(source(ARITHMETIC), options=("--data.source=SortingPrompts", "--data.source.length=3"))
    assert by_file.build("data.source", PromptSource) == SortingPrompts()  # not seed 5
    assert by_option.build("data.source", PromptSource) == SortingPrompts(length=3)


def test_lists_are_merged_item_by_item_and_an_option_adds_to_them(config: Any) -> None:
    first = [{"class_path": "MathReward", "init_args": {"correctness": True, "weight": 2.0}}, "FormatReward"]
    second = [{"class_path": "MathReward", "init_args": {"percent": "unit"}}, "RepetitionReward"]
    trees = [{"model": {"rewards": rewards}} for rewards in (first, second)]
    found = config(*trees, options=("--model.rewards+=ExactReward",)).build("model.rewards", list[Reward])
    assert found == [MathReward(correctness=True, weight=2.0, percent="unit"), RepetitionReward(), ExactReward()]
    added = config(trees[0], {"model": {"rewards+": ["ExactReward"]}}).build("model.rewards", list[Reward])
    assert [type(reward) for reward in added] == [MathReward, FormatReward, ExactReward]


def test_other_parts_of_the_files_are_left_alone(config: Any) -> None:
    found = config({"model": {"nonsense": 1, "sampling": {"temperature": 3}}, "trainer": {"class_path": "no.such"}})
    assert found.build("model.sampling", SamplingParams).temperature == 3.0
    assert found.get("trainer.class_path") == "no.such"
    assert found.get("model.sampling.stop") is None and "data.source" not in found and "model.sampling" in found


def test_what_is_not_given_has_its_defaults(config: Any) -> None:
    assert config({}).build("model.sampling", SamplingParams) == SamplingParams()


def test_the_same_options_mean_the_same_to_fit(tmp_path: Path, config: Any) -> None:
    from tests.config.test_jsonargparse_adapter import Parsed

    first = {"data": {"source": ARITHMETIC}, "model": {"policy": {"from_scratch": {"model_type": "qwen2"}}}}
    first["model"]["rewards"] = [{"class_path": "MathReward", "init_args": {"correctness": True}}, "FormatReward"]
    second = {"model": {"rewards": ["ExactReward", {"class_path": "FormatReward", "init_args": {"weight": 0.3}}]}}
    options = ("--data.source=SortingPrompts", "--data.source.length=3", "--model.rewards+=RepetitionReward")
    ours = config(first, second, options=options)
    theirs = Parsed(["fit", f"--config={tmp_path}/0.yaml", f"--config={tmp_path}/1.yaml", *options]).config["fit"]
    for key, kind in (("data.source", PromptSource), ("model.rewards", list[Reward])):
        assert ours.settings(key, kind) == theirs[key]


# --- plain values ---------------------------------------------------------------------------------------------------


def test_rewards_are_built_again_from_what_they_say_of_themselves() -> None:
    rewards: list[Reward] = [
        PerSource(rewards={"a": MathReward(percent="unit"), "b": ExactReward()}, correctness=True),
        FormatReward(weight=0.1, partial=True),
    ]
    specs = json.loads(json.dumps([reward.spec() for reward in rewards]))
    assert build(list[Reward], specs, "rewards") == rewards


# --- an algorithm of one's own --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trees", "options"),
    [
        ([{"group_size": 4}], [f"--model.algorithm={OWN}", EXTRA]),
        ([{"group_size": 4}, {"class_path": OWN, "init_args": {"extra": 2}}], []),
        ([{"class_path": OWN, "init_args": {"extra": 2}}, {"group_size": 4}], []),
        ([{"class_path": OWN, "init_args": {"group_size": 4}}], ["--model.algorithm.init_args.extra=2"]),
        ([], [f"--model.algorithm={{class_path: {OWN}, init_args: {{extra: 2, group_size: 4}}}}"]),
        ([{"group_size": 4, "beta": 1.0, "preset": "grpo"}, {"preset": "grpo"}], [f"--model.algorithm={OWN}", EXTRA]),
        ([{"class_path": OWN, "init_args": {"extra": 2, "beta": 1.0}}, {"preset": "grpo", "group_size": 4}], []),
        ([{"group_size": 4}, {"class_path": OWN, "init_args": {"extra": 2, "preset": "grpo"}}], []),
        ([{"group_size": 4}], [f"--model.algorithm={OWN}", EXTRA, "--model.algorithm.preset=grpo"]),
    ],
)
def test_a_subclass_of_the_algorithm_keeps_the_fields_given_without_a_class(
    config: Any, trees: list[Any], options: list[str]
) -> None:
    found = config(*({"model": {"algorithm": tree}} for tree in trees), options=tuple(options))
    assert found.build("model.algorithm", GRPOAlgorithm) == OwnAlgorithm(group_size=4, extra=2.0)
    plain = config({"model": {"algorithm": {"group_size": 4}}})  # afterwards all is as before
    assert plain.build("model.algorithm", GRPOAlgorithm) == GRPOAlgorithm(group_size=4)
    assert plain.settings("model.algorithm", GRPOAlgorithm).group_size == 4


def test_a_file_with_the_fields_is_no_class(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("group_size: 4")
    for found in (config(options=("--model.algorithm=own.yaml",)), config({"model": {"algorithm": "own.yaml"}})):
        assert found.build("model.algorithm", GRPOAlgorithm) == GRPOAlgorithm(group_size=4)


def test_a_class_that_is_no_algorithm_is_refused(config: Any) -> None:
    wrong = config(options=("--model.algorithm=grpo_pl.rewards.MathReward",))
    with pytest.raises(ConfigError, match=r"^model\.algorithm: grpo_pl\.rewards\.MathReward is no GRPOAlgorithm$"):
        wrong.build("model.algorithm", GRPOAlgorithm)


@pytest.mark.parametrize(
    "tree",
    [
        {"model.algorithm.group_size": 4, "model.algorithm.beta": 0.1},
        {"model.algorithm": {"group_size": 4, "beta": 0.1}},
        {"model": {"algorithm.group_size": 4, "algorithm": {"beta": 0.1}}},
    ],
)
def test_a_key_may_be_written_out(config: Any, tree: dict[str, Any]) -> None:
    found = config({"model": {"algorithm": {"std_eps": 0.5}}}, tree)
    assert found.build("model.algorithm", GRPOAlgorithm) == GRPOAlgorithm(std_eps=0.5, group_size=4, beta=0.1)
    assert "model.sampling" not in found
    assert config({"data.source": ARITHMETIC}).build("data.source", PromptSource) == ArithmeticPrompts(digits=3, seed=5)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({}, "0.yaml has no data.source."),
        (source(None), "0.yaml has no data.source."),
        (source("ArithmeticPrompt"), "data.source: there is no ArithmeticPrompt; did you mean ArithmeticPrompts?"),
        (source({**ARITHMETIC, "init_args": {"digits": "x"}}), "data.source.digits must be of type int, got 'x'"),
    ],
)
def test_a_wrong_source_is_one_line(config: Any, tmp_path: Path, tree: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tree).build("data.source", PromptSource)
    assert str(caught.value).replace(f"{tmp_path}/", "") == line


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ([1], "model.sampling must be a mapping of fields, got [1]."),
        (None, "model.sampling must be a mapping of fields, got null."),
        ({"max_new_tokens": 3}, "unknown key 'model.sampling.max_new_tokens'; "
         "here that is model.sampling.max_completion_length"),
    ],
)  # fmt: skip
def test_wrong_fields_are_one_line(value: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(SamplingParams, value, "model.sampling")
    assert str(caught.value) == line


def test_values_that_the_object_refuses_are_its_own_error() -> None:
    with pytest.raises(ValueError, match="temperature must be finite and not negative"):
        build(SamplingParams, {"temperature": -1}, "sampling")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty; a configuration is a mapping such as `data: {steps: 100}`."),
        ("- 1\n", "holds '[1]'; a configuration is a mapping"),
        ("a: [\n", ", line 2, column 1: "),  # and the words of libyaml or of PyYAML
        ("a: 1\n---\nb: 2\n", ", line 2, column 1: but found another document"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read([file])
    assert str(file) in str(caught.value) and line in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no such file: .*none\.yaml$"):
        read([tmp_path / "none.yaml"])
    with pytest.raises(ValueError, match=r"is a folder; give a file\.$"):
        read([tmp_path])
    (tmp_path / "config.yaml").write_text("data: {steps: 1}\n")
    with pytest.raises(ValueError, match=r"is a folder; give a file, such as .*config\.yaml\.$"):
        read([tmp_path])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.yaml is no YAML"):
        read([tmp_path / "binary.yaml"])


def test_reading_imports_nothing_that_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    (tmp_path / "c.yaml").write_text("model: {rewards: [{class_path: trap.X}], algorithm: {class_path: trap.Y}}")
    code = "import sys; from grpo_pl.config.objects import read; c = read(['c.yaml']); print(c.get('model.rewards'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[{'class_path': 'trap.X'}]\n"


def test_texts_of_plain_values_and_files_stay_texts(tmp_path: Path) -> None:
    looks = ["1e3", "2020-01-01", "yes", "null", "0x10", "1_000", ".inf", "a: b", "#1", "two\nlines", " x "]
    for text in looks:
        spec = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"name": text}}
        assert build(Reward, spec, "r").name == text
    (tmp_path / "c.yaml").write_text("data: {source: {class_path: JsonLinesPrompts, init_args: {path: '1e3'}}}\n")
    assert read([tmp_path / "c.yaml"]).get("data.source")["init_args"]["path"] == "1e3"


def test_numbers_of_a_file_are_read_as_the_command_line_reads_them(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: 1e-3\nb: 2020-01-01\nc: .inf\n")
    config = read([tmp_path / "c.yaml"])
    assert (config.get("a"), config.get("b"), config.get("c")) == (0.001, "2020-01-01", float("inf"))
