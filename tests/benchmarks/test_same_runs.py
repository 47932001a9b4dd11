"""``benchmarks/same_runs.py``: what counts as equal, and how the first difference is named."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def same_runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("same_runs")


def _logged(same_runs: ModuleType, folder: Path, metrics: str, completions: str = "") -> dict[str, Any]:
    folder.mkdir()
    (folder / "metrics.csv").write_text(metrics)
    (folder / "completions.jsonl").write_text(completions)
    return {
        "command": ["fit"],
        "metrics.csv": same_runs.metrics(folder / "metrics.csv"),
        "completions.jsonl": same_runs.completions(folder / "completions.jsonl"),
    }


ONE = "step,loss,step_time,time/rollout,kl\r\n1,0.5,9,8,0.1\r\n2,0.25,7,6,\r\n"
TEXT = '{"step": 0, "completion": "a", "reward": 1.0}\n{"step": 1, "completion": "b", "reward": 0.0}\n'


@pytest.mark.parametrize(
    ("metrics", "completions", "told"),
    [
        (ONE, TEXT, ""),
        ("step,loss,kl,time/new\r\n1,0.5,0.1,3\r\n2,0.25,,\r\n", TEXT, ""),
        (ONE.replace("0.25", "0.26"), TEXT, "metrics.csv, step 2, loss: 0.25, there 0.26"),
        (ONE.replace("0.1\r", "\r"), TEXT, "metrics.csv, step 1, kl: 0.1, there nothing"),
        (ONE + "3,0.125,1,1,\r\n", TEXT, "metrics.csv, step 3, step: nothing, there 3"),
        ("step,kl,loss\r\n1,0.1,0.5\r\n2,,0.25\r\n", TEXT, "metrics.csv: the same values in another order or form"),
        (ONE, TEXT.replace('"b"', '"c"'), "completions.jsonl, step 1, completion: b, there c"),
        (ONE, "", "completions.jsonl, step 0, step: 0, there nothing"),
    ],
)
def test_the_first_step_and_key_that_differ_are_named(
    same_runs: ModuleType, tmp_path: Path, metrics: str, completions: str, told: str
) -> None:
    ours = _logged(same_runs, tmp_path / "ours", ONE, TEXT)
    assert same_runs.difference(ours, _logged(same_runs, tmp_path / "theirs", metrics, completions)) == told


def test_a_record_of_other_command_lines_is_not_compared(same_runs: ModuleType, tmp_path: Path) -> None:
    ours = _logged(same_runs, tmp_path / "ours", ONE)
    assert "command lines differ" in same_runs.difference(ours, {**ours, "command": ["fit", "--data.steps=3"]})


def test_runs_come_after_those_whose_export_they_read(same_runs: ModuleType) -> None:
    assert same_runs.with_earlier(["preferences", "teacher_tokens"]) == [
        *("quickstart", "distill", "reward_model", "preferences", "teacher_tokens")
    ]
    names = list(same_runs.RUNS)
    for name, command in same_runs.RUNS.items():
        assert all(names.index(earlier) < names.index(name) for earlier in command.after)
        assert all((ROOT / "configs" / f"{config}.yaml").is_file() for config in command.configs)
