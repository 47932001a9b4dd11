"""What an overlay keeps of the configuration before it, and whether jsonargparse words its errors as before."""

import contextlib
import io
import re
from argparse import ArgumentError
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from grpo_pl.cli.trainer import GRPOCLI
from grpo_pl.config import jsonargparse_adapter as adapter
from grpo_pl.config.presets import preset_fields
from grpo_pl.rewards.base import Reward

ARITHMETIC = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
SORTING = "grpo_pl.data.tasks.sorting.SortingPrompts"


def part(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


class Parsed(GRPOCLI):
    """Stops after parsing."""

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    """``settings(tree, overlay, …, options)``: what ``fit`` with these configurations amounts to."""

    def parse(*trees: dict[str, Any], options: tuple[str, ...] = (), verb: str = "fit") -> Any:
        base = {
            "model": {
                "policy": {"from_scratch": {"model_type": "qwen2"}},
                "rewards": [
                    part("grpo_pl.rewards.MathReward", correctness=True, percent="unit"),
                    part("grpo_pl.rewards.FormatReward", weight=0.1, partial=True),
                ],
            },
            "data": {"source": part(ARITHMETIC, digits=3, seed=5)},
        }
        files = [tmp_path / f"{number}.yaml" for number in range(len(trees) + 1)]
        for file, tree in zip(files, [base, *trees], strict=True):
            file.write_text(yaml.safe_dump(tree))
        with contextlib.redirect_stderr(io.StringIO()):
            return Parsed([verb, *(f"--config={file}" for file in files), *options]).config[verb]

    return parse


def test_a_preset_resets_what_stands_before_it_among_files_and_options(settings: Any) -> None:
    before, after = (
        {"model": {"algorithm": {"std_eps": 0.9, "num_iterations": 3}}},
        {"model": {"algorithm": {"beta": 1}}},
    )
    named = {"model": {"algorithm": {"preset": "dr_grpo", "epsilon_high": 0.5}}}
    found = settings(before, named, after, verb="validate")
    expected = preset_fields("dr_grpo") | {"epsilon_high": 0.5, "beta": 1.0}
    expected |= {"group_size": 8, "num_iterations": 3, "num_minibatches": 1}
    assert vars(found.model.algorithm) == expected
    options = ("--model.algorithm.preset=gspo", "--model.algorithm.preset", "dr_grpo", "--model.algorithm.std_eps=0.5")
    found = settings(before, named, after, options=options)
    assert vars(found.model.algorithm) == expected | preset_fields("dr_grpo") | {"std_eps": 0.5}
    assert len(found.config) == 4 and None not in found.config  # files alone


def test_a_reward_in_the_place_of_another_gets_none_of_its_fields(settings: Any) -> None:
    rewards = [part("grpo_pl.rewards.ExactReward"), part("grpo_pl.rewards.RepetitionReward")]
    by_file = settings({"model": {"rewards": rewards}}, verb="validate").model.rewards
    by_option = settings(options=(f"--model.rewards={yaml.safe_dump(rewards, default_flow_style=True)}",)).model.rewards
    for exact, repetition in (by_file, by_option):
        assert (exact.init_args.correctness, exact.init_args.weight) == (False, 1.0)
        assert repetition.init_args.weight == 1.0


@pytest.mark.parametrize(
    "path", ["FormatReward", "grpo_pl.rewards.FormatReward", "grpo_pl.rewards.format.FormatReward"]
)
def test_entries_of_the_same_class_are_merged_by_field(settings: Any, path: str) -> None:
    overlay = {"model": {"rewards": [part("MathReward"), part(path, weight=0.3)]}}
    math, form = settings(overlay).model.rewards
    assert (math.init_args.correctness, math.init_args.percent) == (True, "unit")
    assert (form.init_args.weight, form.init_args.partial) == (0.3, True)


COOL, SHORT = {"temperature": 0.5}, {"max_completion_length": 9}


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("model.rewards", [[part("MathReward")]], {"percent": "hundredth"}),  # of another length
        ("data.source", [part(SORTING)], {"seed": 0}),
        ("data.source", ["SortingPrompts"], {"seed": 0}),
        ("data.source", [{"init_args": {"digits": 2}}], {"digits": 2, "seed": 5}),
        ("model.sampling", [COOL, SHORT], COOL | SHORT),
    ],
)
def test_what_replaces_and_what_is_merged(settings: Any, key: str, given: list[Any], expected: dict[str, Any]) -> None:
    group, name = key.split(".")
    by_file = settings(*({group: {name: value}} for value in given))[key]
    by_option = settings(options=tuple(f"--{key}={value}" for value in given))[key]
    for found in (by_file, by_option):
        (one,) = found if isinstance(found, list) else [found]
        assert expected.items() <= vars(one.get("init_args", one)).items()


def test_what_is_inside_another_part_is_reset_as_well(settings: Any) -> None:
    sets = {"data": {"validation_sets": {"x": part(ARITHMETIC, seed=5)}}}
    found = settings(sets, {"data": {"validation_sets": {"x": part(SORTING)}}}).data.validation_sets["x"]
    assert found.init_args.seed == 0
    mixture, curriculum = "grpo_pl.data.mixture.MixturePrompts", "grpo_pl.data.curriculum.CurriculumPrompts"
    before, after = part(ARITHMETIC, seed=5), part(SORTING)
    mixed = settings(*({"data": {"source": part(mixture, parts={"a": p}, seed=3)}} for p in (before, after)))
    assert mixed.data.source.init_args.parts["a"].init_args.seed == 0
    chosen = settings(*({"data": {"source": part(curriculum, source=p)}} for p in (before, after)))
    assert chosen.data.source.init_args.source.init_args.seed == 0

    def per_source(reward: dict[str, Any]) -> dict[str, Any]:
        return {"model": {"rewards": [part("grpo_pl.rewards.PerSource", correctness=True, rewards={"a": reward})]}}

    judged = settings(per_source(part("MathReward", weight=0.5)), per_source(part("ExactReward")))
    assert judged.model.rewards[0].init_args.rewards["a"].init_args.weight == 1.0


def test_engines_loggers_callbacks_and_judges_are_reset(settings: Any) -> None:
    first = {
        "model": {"engine": part("grpo_pl.rollout.native.engine.NativeEngine", max_batch_rows=7)},
        "trainer": {
            "logger": [part("lightning.pytorch.loggers.CSVLogger", save_dir="a", name="mine")],
            "callbacks": [part("lightning.pytorch.callbacks.EarlyStopping", monitor="x", verbose=True, mode="max")],
        },
        "watch": {"strict": part("grpo_pl.rewards.StrictAnswerReward", weight=3)},
    }
    second = {
        "model": {"engine": part("grpo_pl.rollout.plain.PlainEngine")},
        "trainer": {
            "logger": [part("lightning.pytorch.loggers.TensorBoardLogger", save_dir="b")],
            "callbacks": [part("lightning.pytorch.callbacks.ModelCheckpoint")],
        },
        "watch": {"strict": part("grpo_pl.rewards.LenientAnswerReward")},
    }
    found = settings(first, second)
    assert found.model.engine.init_args.max_batch_rows == 0
    assert found.trainer.logger[0].init_args.name == "lightning_logs"
    assert found.trainer.callbacks[0].init_args.verbose is False
    assert found.trainer.callbacks[0].init_args.mode == "min"
    assert found.watch.strict.init_args.weight == 1.0


# --- wording --------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """Fields of the kinds that configurations have."""

    mode: Literal["a", "b"] = "a"
    count: int | None = 1
    size: int = 1


REPORTS = {
    "--nope=1": "unknown option --nope",
    "--config={part: {sze: 1}}": "unknown key 'part.sze'; did you mean part.size?",
    "--config={prt: {size: 1}}": "unknown key 'prt.size'; did you mean part.size?",
    "--config={prt: 1}": "unknown key 'prt'; did you mean part?",
    "--config={rewards: [{class_path: MathReward, init_args: {wrkers: 1}}]}": "rewards: "
    "grpo_pl.rewards.MathReward has no argument 'wrkers'; did you mean workers?",
    "--rewards+=grpo_pl.rewards.MatReward": "there is no grpo_pl.rewards.MatReward; did you mean MathReward?",
    "--rewards+=MatReward": "rewards: there is no MatReward; did you mean MathReward?",
    "--config={rewards: [{class_path: nowhere.X}]}": "rewards: there is no nowhere.X: No module named 'nowhere'",
    "--config={rewards: [{class_path: user_parts_broken.Broken}]}": "rewards: user_parts_broken.Broken: buy it first",
    "--rewards+=os.path.join": "rewards: os.path.join is no Reward",
    "--config={rewards: [{weight: 1}]}": "rewards: an entry has no class_path that says which Reward is meant",
    "--config={rewards: [5]}": "rewards must be a Reward, given by class_path and init_args, got '5'",
    "--some=[grpo_pl.rewards.MatReward]": "there is no grpo_pl.rewards.MatReward; did you mean MathReward?",
    "--some=[{class_path: ExactReward}, {class_path: MathReward, init_args: {wrkers: 1}}]": "some: "
    "grpo_pl.rewards.MathReward has no argument 'wrkers'; did you mean workers?",
    "--some=[{class_path: FunctionReward, init_args: {name: [3]}}]": "some.name must be of type str, got '[3]'",
    "--some=[{class_path: FunctionReward, init_args: {function: f, conversational: 3}}]": "some.conversational must be "
    "bool or null, got '3'",
    "--some=[os.path.join]": "some: os.path.join is no Reward",
    "--some=[{weight: 1}]": "some: an entry has no class_path that says which Reward is meant",
    "--some=[5]": "some must be a Reward, given by class_path and init_args, got '5'",
    "--some=5": "some must be Reward, a list, bool or null, got '5'",
    "--part.count=x": "part.count must be int or null, got 'x'",
    "--maybe=false": "maybe must be Part or null, got 'false'",
    "--maybe.mode=c": "maybe.mode must be a or b, got 'c'",
    "--part.mode=c": "part.mode must be a or b, got 'c'",
    "--part.size=x": "part.size must be of type int, got 'x'",
    "--part=nofile": "part: there is no file 'nofile'; overlays are given as --config FILE",
    "--config=/none.yaml": "no such file: /none.yaml",
    "--size=1": "need is missing",
}


def _report(argument: str) -> str:
    """What jsonargparse itself says about an argument."""
    parser = adapter.Parser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--rewards", type=list[Reward], sub_configs=True)
    parser.add_argument("--some", type=Reward | Iterable[Reward] | bool | None, sub_configs=True)  # as trainer.logger
    parser.add_argument("--part", type=Part, sub_configs=True)
    parser.add_argument("--maybe", type=Part | None, sub_configs=True)
    parser.add_argument("--size", type=int)
    parser.add_argument("--need", type=int, required=argument == "--size=1")
    with pytest.raises(ArgumentError) as caught:
        parser.parse_args([argument])
    return str(caught.value.message)


def test_every_wording_that_we_read_is_one_that_jsonargparse_still_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_parts_broken.py").write_text("raise ImportError('buy it first')")
    monkeypatch.syspath_prepend(tmp_path)
    options = ["part", "part.size", "part.mode", "rewards"]
    reports = {argument: _report(argument) for argument in REPORTS}
    assert {argument: adapter.explain(report, options) for argument, report in reports.items()} == REPORTS
    texts = [adapter._innermost(report)[1] for report in reports.values()]
    used = {next(pattern for pattern in adapter._RULES if re.search(pattern, text)) for text in texts}
    assert used == adapter._RULES.keys()


@dataclass
class Described:
    size: int = 1
    """How large it is."""


@pytest.mark.parametrize(
    ("arguments", "described"),
    [
        (["--help"], True),
        (["--config=a.yaml", "-h"], True),
        (["--data.source.help=ArithmeticPrompts"], True),
        (["--print_config=comments"], True),
        (["--config=a.yaml", "--print_config"], False),
        (["--config=help.yaml", "--name=-h1"], False),
    ],
)
def test_what_stands_under_a_field_is_read_for_those_who_ask(arguments: list[str], described: bool) -> None:
    with adapter.options_described(arguments):
        parser = adapter.Parser()
        parser.add_argument("--part", type=Described, sub_configs=True)
    assert ("How large it is." in parser.format_help()) == described
    other = adapter.Parser()
    other.add_argument("--part", type=Described, sub_configs=True)
    assert "How large it is." not in other.format_help()


@dataclass
class Larger(Described):
    size: int = 2


def test_subclasses_are_allowed_inside_alone() -> None:
    def parsed() -> Any:
        parser = adapter.Parser(exit_on_error=False)
        parser.add_argument("--part", type=Described)
        return parser.parse_args([f"--part={__name__}.Larger"])

    with adapter.subclasses_allowed(Described):
        assert parsed().part.init_args.size == 2
    with pytest.raises(ArgumentError):
        parsed()


def test_an_argument_is_found_where_jsonargparse_finds_it() -> None:
    inner, outer = adapter.Parser(prog="inner"), adapter.Parser(prog="outer")
    inner.add_argument("--config", action="config")
    inner.add_class_arguments(Described, "part")
    inner.add_argument("--parts", "--part.s", type=list[Described], dest="parts")
    outer.add_subcommands().add_subcommand("fit", inner)
    assert adapter._core.find_action_and_subcommand is adapter._find_action  # parsers ask it
    names = ["config", "part", "part.size", "part.s", "parts", "help", "size", "fit", "fit.part.size", "fit.x", "x"]
    for parser in (inner, outer):
        for name in names:
            for exclude in (None, adapter._actions._ActionConfigLoad):
                found = adapter._find_action(parser, name, exclude)
                assert found == adapter._find_among(parser, name, exclude), name
    assert adapter._find_action(inner, "part.size")[0].dest == "part.size"
    assert adapter._find_action(outer, "fit.part.size")[1] == "fit"
    assert adapter._find_action(inner, "x") == (None, None)
