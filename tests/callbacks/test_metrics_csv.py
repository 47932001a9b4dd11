"""``metrics.csv``: every row on disk at once, new columns, and a resumed run; what loggers of others are given."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.callbacks.metrics_csv import MetricsCSV


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_each_row_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "run" / "metrics.csv")
    log.log_metrics({"reward": 0.5, "epoch": 0}, step=0)
    assert _rows(log.path) == [{"step": "0", "reward": "0.5"}]
    log.log_metrics({"reward": torch.tensor(0.25)}, step=1)
    log.log_metrics({"reward": 1 / 3}, step=2)
    assert [float(row["reward"]) for row in _rows(log.path)] == [0.5, 0.25, 1 / 3]  # unrounded


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


def test_a_resumed_log_keeps_what_is_not_logged_again_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    interrupted = MetricsCSV(file)
    interrupted.resume(5, validated_at=5)  # without a file one begins
    interrupted.log_metrics({"val/pass@1": 0.1}, step=0)
    for step in range(1, 5):
        interrupted.log_metrics({"reward": float(step)}, step=step)
        interrupted.log_metrics({"val/pass@1": 0.2}, step=step)
    resumed = MetricsCSV(file)
    resumed.resume(2, validated_at=1)  # the validation at 2 will be repeated
    resumed.log_metrics({"reward": 30.0, "kl": 0.5}, step=3)
    assert file.read_text().split() == [
        "step,val/pass@1,reward,kl",
        "0,0.1,,",
        "1,,1.0,",
        "1,0.2,,",
        "2,,2.0,",
        "3,,30.0,0.5",
    ]


# --- loggers of others ----------------------------------------------------------------------------------------------

LOGGERS = "--trainer.logger=lightning.pytorch.loggers."


def _fit_with(command_line: Any, name: str, *arguments: str) -> Path:
    config = command_line.config(name, trainer={"accelerator": "cpu", "limit_val_batches": 0}, samples={})
    command_line.done("fit", "--config", config, "--samples.every_n_rollouts=1", "--data.steps=2", *arguments)
    run: Path = command_line.runs / name
    return run


def test_mlflow_gets_metrics_the_configuration_and_tables(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    store = (tmp_path / "mlruns").as_uri()
    run = _fit_with(command_line, "mlflow", f"{LOGGERS}MLFlowLogger", f"--trainer.logger.tracking_uri={store}")
    client = mlflow.MlflowClient(store)
    (kept,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    logged = client.get_metric_history(kept.info.run_id, "reward")
    assert [(point.step, point.value) for point in logged] == [
        (int(row["step"]), float(row["reward"])) for row in _rows(run / "metrics.csv")
    ]
    assert kept.data.params["model/algorithm/group_size"] == "4"
    tables = [file.path for file in client.list_artifacts(kept.info.run_id, "completions")]
    assert tables == ["completions/000001.json", "completions/000002.json"]
    _check_table(json.loads(next(tmp_path.rglob("000002.json")).read_text()), run)


def test_wandb_gets_the_configuration_and_tables(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="needs Weights & Biases, 60 MB: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = _fit_with(command_line, "wandb", f"{LOGGERS}WandbLogger", f"--trainer.logger.save_dir={tmp_path}")
    assert wandb.run.config["model"]["algorithm"]["group_size"] == 4
    wandb.finish()
    tables = sorted(tmp_path.rglob("completions_*.table.json"), key=lambda file: int(file.stem.split("_")[1]))
    assert len(tables) == 2
    _check_table(json.loads(tables[-1].read_text()), run)


def _check_table(table: dict[str, Any], run: Path) -> None:
    """It holds what ``completions.jsonl`` says of the last rollout's first two prompts."""
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    expected = [row for row in rows if row["step"] == 1][:8]
    got = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["completion"] for row in got] == [row["completion"] for row in expected]
    assert [row["reward/exact"] for row in got] == [row["rewards"]["exact"]["value"] for row in expected]
    assert [row["advantage"] for row in got] == pytest.approx([row["advantage"] for row in expected])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("step,reward\n1,0.5\n2.0,0.5\n", 3),
        ("step,reward\n1,high\n", 2),
        ("step,reward\n1,0.5,7\n", 2),
        ("step,reward\n1\n2,0.5\n", 2),
        ("rollout,reward\n1,0.5\n", 2),
    ],
)
def test_an_edited_file_that_cannot_be_gone_on_with_is_named_with_its_line(
    tmp_path: Path, text: str, line: int
) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{file}, line {line}: [^\n]*$"):
        MetricsCSV(file).resume(9, validated_at=9)
    assert file.read_text() == text


def test_a_last_row_whose_writing_was_cut_short_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    for cut in ("2", "2,1e-"):
        file.write_text(f"step,reward\n1,0.5\n{cut}")
        MetricsCSV(file).resume(9, validated_at=9)
        assert _rows(file) == [{"step": "1", "reward": "0.5"}]
