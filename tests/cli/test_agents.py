"""Runs in environments from the command line: the shipped configurations, and every verb that reads what they leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.main import main
from grpo_pl.data.demonstrations import read_demonstrations

TINY = (
    *("--trainer.val_check_interval=2", "--data.steps=2", "--data.prompts_per_step=3", "--data.val_prompts=3"),
    *("--model.algorithm.group_size=2", "--model.cold_start.steps=2", "--model.cold_start.batch_size=2"),
    *("--model.policy.from_scratch.hidden_size=16", "--model.policy.from_scratch.num_hidden_layers=1"),
    *("--model.policy.from_scratch.intermediate_size=16", "--samples.every_n_rollouts=2"),
)
NEEDS = {"frozen_lake": "gymnasium", "guess_number": "textarena", "calculator": "pydantic"}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(
    scope="module",
    params=["frozen_lake", *(pytest.param(name, marks=pytest.mark.slow) for name in ("guess_number", "calculator"))],
)
def run(request: pytest.FixtureRequest, command_line: Any) -> Path:
    """A tiny run of a shipped configuration."""
    name = request.param
    pytest.importorskip(NEEDS[name])
    outcome = command_line.done("fit", f"--config=configs/{name}.yaml", *TINY, f"--name={name}")
    assert "samples of rollout 2" in outcome.err
    return Path(command_line.runs / name)


def test_completions_have_every_turn_with_its_reward_and_advantage(run: Path) -> None:
    rows = _rows(run / "completions.jsonl")
    assert len(rows) == 12
    for row in rows:
        episode = row["episode"]
        assert episode["status"] == "ok" and episode["finish_reason"] == row["finish_reason"]
        assert episode["turns"] and row["completion"] == episode["turns"][-1]["action"]
        shares = [turn["advantage"] for turn in episode["turns"]]
        assert shares == pytest.approx([row["advantage"]] * len(shares), abs=1e-6)
        assert episode["return"] == pytest.approx(sum(turn["reward"] for turn in episode["turns"]))
    data = (run / "report.html").read_text()
    assert data.count('"turns":[') == 12


def test_files_of_exchanges_are_scored_as_training_scored_them(run: Path, tmp_path: Path) -> None:
    for file in (run / "completions.jsonl", _predicted(run, tmp_path)):
        scores = tmp_path / "scores.jsonl"
        assert main(["score", str(file), f"--config={run / 'config.yaml'}", f"--output={scores}"]) == 0
        before, after = _rows(file), _rows(scores)
        assert [row["correct"] for row in after] == [row["correct"] for row in before]
        assert [row["reward"] for row in after] == pytest.approx([row["reward"] for row in before])


def _predicted(run: Path, folder: Path) -> Path:
    file = folder / "predicted.jsonl"
    assert main(["predict", f"--model={run}", f"--output={file}", "--prompts=3", "--samples=2"]) == 0
    return file


def test_predictions_are_exchanges(run: Path, tmp_path: Path) -> None:
    file = _predicted(run, tmp_path)
    rows = _rows(file)
    assert [(row["sample"], row["finish_reason"]) for row in rows] == [
        (number % 2, row["episode"]["finish_reason"]) for number, row in enumerate(rows)
    ]
    for row in rows:
        roles = [message["role"] for message in row["completion"]]
        turns = row["episode"]["turns"]
        assert roles == (["assistant", "user"] * len(turns))[:-1]
        assert [m["content"] for m in row["completion"][::2]] == [turn["action"] for turn in turns]
        assert [m["content"] for m in row["completion"][1::2]] == [turn["observation"] for turn in turns[:-1]]
        (asked,) = row["prompt"]
        assert asked["role"] == "user" and row["episode"]["observation"] in asked["content"]
        assert row["tokens"] >= len(turns)
    shown = read_demonstrations(file)
    assert [len(each.further) + 1 for each in shown] == [len(row["episode"]["turns"]) for row in rows]
    again = _rows(_predicted(run / "export", tmp_path))
    assert again == rows  # an export says as much about the environment as the run


def test_problems_of_a_file_are_played(run: Path, tmp_path: Path, capsys: Any) -> None:
    problems = tmp_path / "problems.jsonl"
    given = {
        "frozen_lake": {"desc": ["SF", "FG"], "id": 1},
        "guess_number": {"id": 1},
        "calculator": {"problem": "111+222+333=", "answer": 666, "id": 1},
    }[run.name]
    problems.write_text(json.dumps(given) + "\n")
    out = tmp_path / "evaluation.jsonl"
    assert main(["evaluate", f"--model={run}", f"--data={problems}", "--n=4", f"--output={out}"]) == 0
    (result,) = _rows(out)
    assert len(result["samples"]) == 4 and "pass@4" in capsys.readouterr().out
    for sample in result["samples"]:
        assert sample["completion"] == sample["episode"]["turns"][-1]["action"]
        assert sample["correct"] is (sample["rewards"][next(iter(sample["rewards"]))]["value"] >= 1)
    if run.name == "frozen_lake":
        assert result["samples"][0]["episode"]["observation"] == "@F\nFG\n#FF#"


def test_a_validation_plays_the_held_out_problems_again(run: Path, tmp_path: Path, command_line: Any) -> None:
    out = tmp_path / "validation.json"
    outcome = command_line(
        "validate",
        *(f"--config={run / 'config.yaml'}", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", f"--output={out}"),
    )
    assert outcome.status == 0, outcome.err
    last = (run / "metrics.csv").read_text().splitlines()
    columns = dict(zip(last[0].split(","), last[-1].split(","), strict=True))
    found = json.loads(out.read_text())["metrics"]
    assert found["val/pass@1"]["value"] == pytest.approx(float(columns["val/pass@1"]))


def test_under_turn_credit_the_turns_of_an_episode_differ(command_line: Any) -> None:
    pytest.importorskip("gymnasium")
    overlay = "--config=configs/algorithm/gigpo.yaml"
    outcome = command_line(
        "fit",
        *("--config=configs/frozen_lake.yaml", overlay, *TINY, "--model.algorithm.group_size=8", "--name=gigpo"),
        *("--data.steps=1", "--trainer.limit_val_batches=0"),
    )
    assert outcome.status == 0, outcome.err
    episodes = [row["episode"]["turns"] for row in _rows(command_line.runs / "gigpo" / "completions.jsonl")]
    assert any(len({round(turn["advantage"], 6) for turn in turns}) > 1 for turns in episodes)
