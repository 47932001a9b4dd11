"""Flags, callbacks and plugins of Lightning's: each works, or is refused in one line before the cold start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

PL = "lightning.pytorch"
SPLIT = {"class_path": f"{PL}.strategies.ModelParallelStrategy", "init_args": {"data_parallel_size": 2}}


def _overlay(command_line: Any, **trainer: Any) -> Path:
    file = Path(command_line.folder / "trainer.yaml")
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    return file


def _callback(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{PL}.callbacks.{name}", "init_args": arguments}


def _with(name: str, **arguments: Any) -> dict[str, Any]:
    return {"callbacks": [_callback(name, **arguments)]}


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        (_with("StochasticWeightAveraging", swa_lrs=0.1), "trainer: StochasticWeightAveraging averages once"),
        (_with("GradientAccumulationScheduler", scheduling={0: 2}), "trainer: GradientAccumulationScheduler counts"),
        (_with("LearningRateFinder"), "trainer: LearningRateFinder looks for a loss that falls"),
        (_with("BatchSizeFinder"), "trainer: BatchSizeFinder .*max_tokens_per_microbatch null"),
        (_with("ModelPruning", pruning_fn="l1_unstructured"), "trainer: ModelPruning masks weights"),
        (_with("BackboneFinetuning"), r"trainer: BackboneFinetuning .* model\.policy\.lora"),
        (
            {"plugins": [{"class_path": f"{PL}.plugins.io.AsyncCheckpointIO"}]},
            "trainer: AsyncCheckpointIO writes later",
        ),
        (_with("EarlyStopping", monitor="val/pass@11"), r"trainer: .*'val/pass@11', .*did you mean val/pass@1\?"),
        (_with("EarlyStopping", monitor="reward"), "trainer: EarlyStopping monitors 'reward', which no valid"),
        (_with("ModelCheckpoint", monitor="val/pas@1"), "trainer: ModelCheckpoint .*'val/pas@1'"),
        (
            _with("ModelCheckpoint", dirpath="memory://here"),
            "trainer: ModelCheckpoint has dirpath 'memory://here', and",
        ),
        ({"strategy": "fsdp"}, r"trainer\.strategy is fsdp, .*configs/strategy/fsdp\.yaml"),
        ({"strategy": "ddp_spawn"}, r"trainer\.strategy is ddp_spawn, "),
        ({"strategy": {"class_path": f"{PL}.strategies.FSDPStrategy"}}, r"trainer\.strategy is FSDPStrategy, .*fsdp\."),
        ({"strategy": SPLIT}, r"trainer\.strategy is ModelParallelStrategy, .*fsdp\."),
        ({"precision": "16-mixed"}, r"trainer\.precision is 16-mixed"),
        ({"strategy": "deepspeed"}, r"trainer\.strategy is deepspeed, "),
        ({"barebones": True}, r"trainer\.barebones would leave out"),
        ({"val_check_interval": 0}, r"trainer\.val_check_interval must be 1 rollout or more, got 0"),
        ({"val_check_interval": -5}, r"trainer\.val_check_interval must be 1 rollout or more, got -5"),
        ({"precision": "bf16-true"}, r"trainer\.precision is bf16-true: set bf16-mixed"),
        ({"precision": "16-true"}, r"trainer\.precision is 16-true: set bf16-mixed"),
        ({"accumulate_grad_batches": 4}, r"trainer\.accumulate_grad_batches is 4, but"),
        ({"gradient_clip_val": 0.5}, r".*set model\.optimization\.max_grad_norm"),
        ({"gradient_clip_algorithm": "value"}, r".*set model\.optimization\.max_grad_norm"),
        ({"max_epochs": 4}, r"trainer\.max_epochs is 4: the length of a run is data\.steps, in rollouts"),
        ({"max_steps": 1}, r"trainer\.max_steps is 1: the length of a run is data\.steps, in rollouts"),
    ],
)
def test_what_would_do_something_else_is_refused_before_the_cold_start(
    fresh_command_line: Any, trainer: dict[str, Any], line: str
) -> None:
    overlay = _overlay(fresh_command_line, **trainer)
    outcome = fresh_command_line("fit", "--config", fresh_command_line.config(), "--config", overlay)
    assert outcome.status == 1
    (told,) = outcome.err.splitlines()
    assert re.search(f"^grpo-pl fit: error: {line}", told), told
    assert not fresh_command_line.runs.exists() and not list(fresh_command_line.cache.glob("cold_start*"))


def _completions(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(command_line: Any) -> Path:
    """A run without any of them."""
    command_line.done("fit", "--config", command_line.config("plain"))
    return Path(command_line.runs / "plain")


@pytest.mark.slow
def test_callbacks_of_lightning_that_work_change_nothing_of_a_run(
    command_line: Any, plain: Path, read_metrics: Any
) -> None:
    working = [
        _callback("Timer", duration="00:00:30:00"),
        _callback("RichProgressBar"),
        _callback("RichModelSummary"),
        _callback("SpikeDetection", exclude_batches_path=str(command_line.folder)),
        _callback("LearningRateMonitor"),
        _callback("DeviceStatsMonitor"),
        _callback("OnExceptionCheckpoint", dirpath=str(command_line.folder)),
        _callback("EarlyStopping", monitor="val/pass@1", mode="max", patience=9),
        _callback("ModelCheckpoint", dirpath=str(command_line.folder / "own"), monitor="reward", mode="max"),
    ]
    overlay = _overlay(command_line, callbacks=working)
    command_line.done("fit", "--config", command_line.config("watched"), "--config", overlay)
    runs = [plain, command_line.runs / "watched"]
    assert _completions(runs[0]) == _completions(runs[1])
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("lr-", "DeviceStatsMonitor"))}
        for row in read_metrics(runs[1] / "metrics.csv")
    ]
    assert read_metrics(runs[0] / "metrics.csv") == [row for row in rows if row.keys() != {"step"}]
    assert list((command_line.folder / "own").glob("*.ckpt"))
    assert any(name.startswith("lr-") for row in read_metrics(runs[1] / "metrics.csv") for name in row)
    resolved = yaml.safe_load((runs[1] / "config.yaml").read_text())
    assert resolved["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"  # an enumeration's member


def test_flags_of_lightning_that_work_change_nothing_of_a_run(command_line: Any, plain: Path) -> None:
    logger = {"class_path": f"{PL}.loggers.CSVLogger", "init_args": {"save_dir": str(command_line.folder)}}
    flags = {"deterministic": True, "detect_anomaly": True, "max_time": "00:00:30:00", "profiler": "simple"}
    overlay = _overlay(command_line, **flags, limit_val_batches=1, logger=logger)
    command_line.done("fit", "--config", command_line.config("with"), "--config", overlay)
    assert _completions(plain) == _completions(command_line.runs / "with")
    assert list(command_line.folder.glob("lightning_logs/*/metrics.csv"))


def test_max_time_ends_a_run_with_a_checkpoint(command_line: Any, read_metrics: Any) -> None:
    config = command_line.config("timed", data__steps=5000, trainer__val_check_interval=5000)
    command_line.done("fit", "--config", config, "--trainer.max_time=00:00:00:01", "--checkpoint.keep=1")
    rows = [row for row in read_metrics(command_line.runs / "timed/metrics.csv") if "reward" in row]
    saved = torch.load(command_line.runs / "timed/checkpoints/last.ckpt", weights_only=True)
    assert 0 < len(rows) == saved["RolloutDataModule"]["completed_rollouts"] < 5000


def test_early_stopping_ends_a_run(command_line: Any, read_metrics: Any) -> None:
    stop = _callback("EarlyStopping", monitor="val/mean_length", mode="max", stopping_threshold=1.0)
    overlay = _overlay(command_line, callbacks=[stop], val_check_interval=1)
    command_line.done("fit", "--config", command_line.config("stopped"), "--config", overlay)
    rows = [row for row in read_metrics(command_line.runs / "stopped/metrics.csv") if "reward" in row]
    assert len(rows) < 4


def test_a_run_ends_after_limit_train_batches_rollouts(command_line: Any, read_metrics: Any) -> None:
    command_line.done("fit", "--config", command_line.config("short"), "--trainer.limit_train_batches=2")
    rows = read_metrics(command_line.runs / "short/metrics.csv")
    assert [row["step"] for row in rows if "reward" in row] == ["1", "2"]


@pytest.mark.parametrize(("batches", "repeated"), [("2", 2), pytest.param("0.25", 1, marks=pytest.mark.slow)])
def test_overfit_batches_asks_the_same_problems_again_in_a_run_of_full_length(
    command_line: Any, batches: str, repeated: int
) -> None:
    name = f"overfit{repeated}"
    command_line.done("fit", "--config", command_line.config(name), f"--trainer.overfit_batches={batches}")
    rows = _completions(command_line.runs / name)
    asked = [sorted({row["prompt_id"] for row in rows if row["step"] == step}) for step in range(4)]
    assert all(asked[step] == asked[step % repeated] for step in range(4)) and len(asked[3]) == 4
    assert len({tuple(one) for one in asked}) == repeated
    drawn = [[row["completion"] for row in rows if row["step"] == step] for step in (0, repeated)]
    assert drawn[0] != drawn[1]


def test_a_fast_dev_run_makes_two_rollouts_and_two_steps_of_a_cold_start(fresh_command_line: Any) -> None:
    """However many updates a rollout has."""
    config = fresh_command_line.config(model__algorithm={"group_size": 4, "beta": 0.0, "num_iterations": 3})
    outcome = fresh_command_line.done("fit", "--config", config, "--trainer.fast_dev_run=true")
    assert re.findall(r"cold start: (\d+/\d+)", outcome.out + outcome.err)[-1] == "2/2"
    assert "after rollout 0" in outcome.err and re.search(r"^rollout 2: val/greedy", outcome.err, re.MULTILINE)
    assert "held-out problems" in outcome.out and "checkpoint" not in outcome.out
    next_command = outcome.out.splitlines()[-1]
    export = re.fullmatch(r"next +grpo-pl serve --model (\S+)", next_command)
    assert export and Path(export[1], "model.safetensors").is_file()


def test_a_run_folder_that_is_no_folder_is_refused(fresh_command_line: Any) -> None:
    outcome = fresh_command_line("fit", "--config", fresh_command_line.config(), runs="s3://bucket/runs")
    assert outcome.status == 1 and "--runs_dir is 's3://bucket/runs', and a run is written to files" in outcome.err
