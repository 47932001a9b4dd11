"""``metrics.csv``: every row on disk at once, new columns, and a resumed run."""

import csv
from pathlib import Path

import torch

from grpo_pl.loggers import MetricsCSV


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_each_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "run" / "metrics.csv")
    log.log_metrics({"reward": 0.5, "epoch": 0}, step=0)
    assert _rows(log.path) == [{"step": "0", "reward": "0.5"}]
    log.log_metrics({"reward": torch.tensor(0.25)}, step=1)
    assert [row["reward"] for row in _rows(log.path)] == ["0.5", "0.25"]


def test_a_new_name_becomes_a_column_and_earlier_rows_stay(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"reward": 1.0}, step=0)
    log.log_metrics({"val/pass@1": 0.5}, step=0)
    log.log_metrics({"reward": 2.0, "kl": 3.0}, step=1)
    assert log.path.read_text().splitlines()[0] == "step,reward,val/pass@1,kl"
    assert [list(row.values()) for row in _rows(log.path)] == [
        ["0", "1.0", "", ""],
        ["0", "", "0.5", ""],
        ["1", "2.0", "", "3.0"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]  # nothing half-written stays


def test_a_row_without_some_of_the_columns_leaves_them_empty(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"a": 1.0, "b": 2.0}, step=0)
    log.log_metrics({"b": 4.0}, step=1)
    assert _rows(log.path)[1] == {"step": "1", "a": "", "b": "4.0"}


def test_a_resumed_log_keeps_what_came_up_to_its_step_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    interrupted = MetricsCSV(file)
    for step in range(1, 5):
        interrupted.log_metrics({"reward": float(step)}, step=step)
    resumed = MetricsCSV(file)
    resumed.resume(2, validated_at=2)
    assert [row["step"] for row in _rows(file)] == ["1", "2"]
    resumed.log_metrics({"reward": 30.0}, step=3)
    resumed.log_metrics({"reward": 40.0, "kl": 0.1}, step=4)
    assert [row["reward"] for row in _rows(file)] == ["1.0", "2.0", "30.0", "40.0"]
    assert [row["kl"] for row in _rows(file)] == ["", "", "", "0.1"]


def test_a_validation_that_will_be_repeated_leaves_the_log(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    interrupted = MetricsCSV(file)
    interrupted.log_metrics({"val/pass@1": 0.1}, step=0)
    interrupted.log_metrics({"reward": 1.0}, step=1)
    interrupted.log_metrics({"val/pass@1": 0.2}, step=1)
    MetricsCSV(file).resume(1, validated_at=0)
    assert [(row["step"], row["val/pass@1"]) for row in _rows(file)] == [("0", "0.1"), ("1", "")]


def test_resuming_without_a_file_begins_one(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.resume(5, validated_at=5)
    log.log_metrics({"reward": 1.0}, step=5)
    assert _rows(log.path) == [{"step": "5", "reward": "1.0"}]


def test_figures_survive_the_file_unrounded(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"reward": 1 / 3}, step=0)
    assert float(_rows(log.path)[0]["reward"]) == 1 / 3
