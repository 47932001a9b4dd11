"""Presets by name and by file against ``presets.csv``, a table of all fields of all presets, and what they leave."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.config.jsonargparse_adapter import Parser
from grpo_pl.config.objects import ConfigError, build, read
from grpo_pl.config.presets import preset_fields, preset_name, preset_values, presets, with_preset_fields
from grpo_pl.config.shipped import CONFIGS
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.fields import BUDGET

FILES = sorted((CONFIGS / "algorithm").glob("*.yaml"))
with Path(__file__).with_name("presets.csv").open(newline="") as _file:
    TABLE = {row.pop("field"): row for row in csv.DictReader(_file)}


def cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def column(algorithm: GRPOAlgorithm) -> dict[str, str]:
    return {name: cell(value) for name, value in algorithm.values().items()}


def algorithm_of(*trees: dict[str, Any] | Path, folder: Path, options: tuple[str, ...] = ()) -> GRPOAlgorithm:
    files = []
    for number, tree in enumerate(trees):
        file = tree if isinstance(tree, Path) else folder / f"{number}.yaml"
        if not isinstance(tree, Path):
            file.write_text(yaml.safe_dump({"model": {"algorithm": tree}}))
        files.append(file)
    return read(files, options).build("model.algorithm", GRPOAlgorithm)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preset_has_the_fields_of_the_table(file: Path) -> None:
    expected = {field: row[file.stem] for field, row in TABLE.items()}
    assert column(read([file]).build("model.algorithm", GRPOAlgorithm)) == expected
    by_name = build(GRPOAlgorithm, {"preset": file.stem}, "model.algorithm")
    assert column(by_name) == expected
    assert GRPOAlgorithm(**preset_fields(file.stem)) == by_name


def test_the_table_and_the_help_have_every_preset() -> None:
    assert len(FILES) == 30
    assert list(presets()) == [file.stem for file in FILES] == list(TABLE["beta"])


def test_a_preset_file_names_itself_and_says_what_differs_and_no_more() -> None:
    """So a new field changes no preset."""
    defaults = vars(GRPOAlgorithm())
    for file in FILES:
        model = yaml.safe_load(file.read_text())["model"]
        before = ["rewards+"] if file.stem == "grpo_process" else []  # it needs a reward that scores steps
        algorithm = GRPOAlgorithm(**preset_fields(file.stem))
        needs = algorithm.needs
        after = ["privileged"] * bool(needs.teacher and needs.teacher.of_itself)
        after += ["demonstrations"] * bool(needs.demonstrations)
        assert list(model) == [*before, "algorithm", *after], file
        named, *own = model["algorithm"].items()
        assert named == ("preset", file.stem)
        assert [name for name, value in own if name in BUDGET or value == defaults[name]] == [], file


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_the_quickstart_keeps_its_budget_under_a_preset(tmp_path: Path, name: str) -> None:
    budget = dict(zip(BUDGET, (6, 3, 2), strict=True))
    quickstart, file = CONFIGS / "quickstart.yaml", CONFIGS / "algorithm" / f"{name}.yaml"
    expected = GRPOAlgorithm(**preset_fields(name), **budget)
    assert algorithm_of(quickstart, budget, file, folder=tmp_path) == expected
    assert algorithm_of(quickstart, budget, {"preset": name}, folder=tmp_path) == expected


def test_every_preset_keeps_the_budget() -> None:
    budget, parser = dict(zip(BUDGET, (6, 3, 2), strict=True)), Parser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--model.algorithm", type=GRPOAlgorithm)
    for name in presets():
        texts = [json.dumps({"model": {"algorithm": tree}}) for tree in (budget, {"preset": name})]
        found = parser.parse_args([f"--config={text}" for text in texts]).model.algorithm
        assert vars(found) | {"terms": {}} == preset_values(name) | budget | {"terms": {}}, name


def test_what_is_set_later_wins_and_a_preset_resets_what_was_set_before(tmp_path: Path) -> None:
    def found(*trees: dict[str, Any], options: tuple[str, ...] = ()) -> GRPOAlgorithm:
        return algorithm_of(*trees, folder=tmp_path, options=options)

    first = {"std_eps": 0.9, "beta": 0.5}
    assert found(first, {"beta": 0.1}) == GRPOAlgorithm(std_eps=0.9, beta=0.1)
    assert found(first, {"preset": "grpo"}) == GRPOAlgorithm()
    assert found({"preset": "dr_grpo"}, {"beta": 0.1}) == GRPOAlgorithm(scale="none", aggregation="constant", beta=0.1)
    assert found({"beta": 0.1, "preset": "dr_grpo"}) == GRPOAlgorithm(scale="none", aggregation="constant", beta=0.1)
    gmpo = GRPOAlgorithm(ratio_level="geometric", epsilon_low=0.4, epsilon_high=0.4, beta=0.0)
    assert found({"preset": "dapo", "std_eps": 0.9}, {"preset": "gmpo"}) == gmpo
    assert found({"preset": "dapo"}, options=("--model.algorithm.preset=gmpo",)) == gmpo
    options = ("--model.algorithm.std_eps=0.9", "--model.algorithm.preset=gmpo", "--model.algorithm.group_size=4")
    assert found(options=options) == GRPOAlgorithm(**preset_fields("gmpo"), group_size=4)


def test_the_key_may_be_written_out(tmp_path: Path) -> None:
    file = tmp_path / "flat.yaml"
    file.write_text("model: {algorithm.beta: 0.1, algorithm.preset: dr_grpo}")
    found = Parser()
    found.add_argument("--config", action="config")
    found.add_argument("--model.algorithm", type=GRPOAlgorithm)
    settings = found.parse_args([f"--config={file}"])
    assert vars(settings.model.algorithm) == vars(GRPOAlgorithm(**preset_fields("dr_grpo") | {"beta": 0.1}))


@pytest.mark.parametrize("name", ["dapoo", None, ["dapo"], 3])
def test_a_wrong_name_is_one_line_with_those_there_are(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        algorithm_of({"preset": name}, folder=tmp_path)
    assert str(caught.value).startswith(f"model.algorithm.preset: no preset {name!r}")
    assert str(caught.value).endswith(f" There are: {', '.join(presets())}.")
    if name == "dapoo":
        assert "; did you mean dapo? There are" in str(caught.value)


def test_a_preset_beside_a_class_is_told_where_it_belongs() -> None:
    with pytest.raises(ValueError, match="has its fields, and the preset, under init_args"):
        with_preset_fields({"model": {"algorithm": {"class_path": "mine.Objective", "preset": "dapo"}}})


def test_an_objective_is_known_by_its_fields_whatever_its_budget() -> None:
    for name in presets():
        assert preset_name(preset_values(name) | {"group_size": 5, "of_another_version": 1}) == name
    near = preset_values("dapo") | {"beta": 0.1}
    assert preset_name(near) == "dapo, beta 0.1"
    assert preset_name(near | {"dual_clip": 3.0}) == "dapo, dual_clip 3.0, beta 0.1"
    assert preset_name(near | {"dual_clip": 3.0, "entropy_coef": 0.1}) is None
    assert preset_name({key: value for key, value in near.items() if key != "dual_clip"}) is None  # not known to be off
    assert preset_name({"terms": {"mine": {"class_path": "mine.Term"}}}) is None


def test_a_run_under_a_preset_keeps_all_fields_and_can_be_repeated(command_line: Any) -> None:
    """What `config.yaml` holds is resolved, as it was before presets had names: its run is the same again."""
    config, few = command_line.config("preset"), ("--data.steps=1", "--trainer.limit_val_batches=0")
    file = CONFIGS / "algorithm" / "dr_grpo.yaml"
    assert command_line("fit", f"--config={config}", f"--config={file}", "--model.algorithm.beta=0.1", *few).status == 0
    saved = command_line.runs / "preset" / "config.yaml"
    expected = GRPOAlgorithm(**preset_fields("dr_grpo") | {"beta": 0.1}, group_size=4)
    fields_saved = yaml.safe_load(saved.read_text())["model"]["algorithm"]
    assert {name: cell(value) for name, value in fields_saved.items()} == column(expected)
    command_line.done("fit", f"--config={saved}", "--name=again", *few)
    again = command_line.runs / "again" / "config.yaml"
    assert yaml.safe_load(again.read_text())["model"] == yaml.safe_load(saved.read_text())["model"]
    other = read([saved, CONFIGS / "algorithm" / "gspo.yaml"]).build("model.algorithm", GRPOAlgorithm)
    assert other == GRPOAlgorithm(**preset_fields("gspo"), group_size=4)
