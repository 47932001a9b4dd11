"""The commands of docs/data.md, run as they are written, with a tiny model in the folder that they name."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.cli.main import main
from grpo_pl.evaluation.report import EvaluationReport
from tests.conftest import TINY_POLICY
from tests.docs.pages import ROOT, blocks, page, section

PAGE = page("data")
POLICY = {**TINY_POLICY, "max_position_embeddings": 128}


def _blocks(heading: str, language: str) -> list[str]:
    return blocks(section(PAGE, heading), language)


def _run(heading: str) -> None:
    (commands,) = _blocks(heading, "bash")
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "grpo-pl"
        assert main(arguments) == 0, line


def _rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.fixture(scope="module")
def mine() -> dict[str, Any]:
    """The configuration of the page, made short."""
    (block,) = _blocks("Your own data, reward and model", "yaml")
    tree: dict[str, Any] = yaml.safe_load(block)
    assert tree["data"]["steps"] and tree["model"]["sampling"]["max_completion_length"]
    tree["data"]["steps"], tree["model"]["sampling"]["max_completion_length"] = 2, 32
    return tree


@pytest.fixture(scope="module")
def desk(command_line: Any, mine: dict[str, Any]) -> Path:
    """A folder with all that the page's first section asks for, and a trained model besides."""
    config = command_line.config(
        "teacher",
        model__policy={"from_scratch": POLICY},
        model__template=mine["model"]["template"],
        model__cold_start={"steps": 150, "batch_size": 16, "lr": 0.01},
    )
    command_line.done("fit", f"--config={config}", "--data.steps=1")
    folder: Path = command_line.folder / "desk"
    shutil.copytree(command_line.runs / "teacher", folder / "runs" / "teacher")
    shutil.copytree(command_line.runs / "teacher" / "export", folder / "my-model")
    (line,), (reward,) = (_blocks("Your own data, reward and model", kind) for kind in ("json", "python"))
    problems = [{**json.loads(line), "question": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (folder / "my_reward.py").write_text(reward)
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    return folder


@pytest.fixture
def at_the_desk(command_line: Any, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_PL_CACHE", str(command_line.cache))
    monkeypatch.chdir(desk)


def at_desk(test: Any) -> Any:
    """A test of minutes in that folder."""
    return pytest.mark.slow(pytest.mark.usefixtures("at_the_desk")(test))


@at_desk
def test_own_data_own_reward_and_a_local_model() -> None:
    _run("Your own data, reward and model")
    with Path("runs/mine/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]]
    assert [float(row["rewards/brief/mean"]) for row in rows] == [1.0, 1.0]
    report = EvaluationReport.read(Path("after.json"))
    held_out = set(report.questions["val"].values())
    assert 1 <= len(held_out) <= 20
    trained_on = {row["prompt"] for row in _rows("runs/mine/completions.jsonl")}
    assert not any(question in prompt for question in held_out for prompt in trained_on)
    predictions = _rows("predictions.jsonl")
    assert len(predictions) == 4 * len(held_out)
    assert all(row["rewards"]["brief"]["value"] == 1.0 for row in predictions)


@at_desk
def test_a_filter_and_a_run_on_what_it_kept(capsys: pytest.CaptureFixture[str]) -> None:
    _run("The right difficulty")
    kept = _rows("filtered.jsonl")
    assert all(0.1 <= row["pass_rate"] <= 0.9 for row in kept)
    assert "training rows taken: those in 'filtered.jsonl'." in capsys.readouterr().err
    (newest,) = [
        path for path in Path("runs").glob("mine*") if "kept: filtered.jsonl" in (path / "config.yaml").read_text()
    ]
    questions = {row["question"] for row in kept}
    assert {row["prompt"].splitlines()[0] for row in _rows(f"{newest}/completions.jsonl")} <= questions


@at_desk
def test_a_student_learns_from_the_right_answers_of_a_teacher(command_line: Any) -> None:
    (block,) = _blocks("Rejection sampling and distillation", "yaml")
    student = yaml.safe_load(command_line.config("student").read_text())
    student["model"]["policy"] = {"from_scratch": {**POLICY, "hidden_size": 16}}
    student["model"]["cold_start"] = {**yaml.safe_load(block)["model"]["cold_start"], "steps": 30}
    student["data"]["steps"] = 1
    Path("student.yaml").write_text(yaml.safe_dump(student))
    before = set((command_line.cache / "cold_start").iterdir())
    _run("Rejection sampling and distillation")
    taught = _rows("taught.jsonl")
    assert taught and all(row["correct"] for row in taught)
    assert {"prompt", "completion", "answer", "correct", "reward"} <= taught[0].keys()
    assert len(set((command_line.cache / "cold_start").iterdir()) - before) == 1  # made once, taken twice
    measured = EvaluationReport.read(Path("student.json")).measured["val/pass@1"]
    with Path("runs/student/metrics.csv").open(newline="") as file:
        assert float(next(csv.DictReader(file))["val/pass@1"]) == pytest.approx(measured.mean)


def test_every_configuration_on_the_page_names_sources_and_rewards_that_exist() -> None:
    from importlib import import_module

    names = set(re.findall(r"\bgrpo_pl\.(?:data|rewards)\.[\w.]*[A-Z]\w+", PAGE))
    assert len(names) >= 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
    assert all((ROOT / file).is_file() for file in re.findall(r"`(configs/[\w./]+)`", PAGE))
