"""A full disk costs what cannot be written while it lasts, and no run."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.cli.commands.export import export
from grpo_pl.files.checkpoints import broken, save_tensors
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.files.writing import append_lines


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """No file of this process can grow beyond ``size`` bytes, as if its disk were full. Not for the length of a test:
    pytest's own output may go to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _kept(run: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in run.glob("checkpoints/rollout-*.ckpt"))


def _filling(disk: Path, first: int, last: int) -> list[dict[str, Any]]:
    return [{"class_path": "user_parts.FillDisk", "init_args": {"folder": str(disk), "first": first, "last": last}}]


@pytest.mark.parametrize("limit", [0, 1, 700, 5_000, 100_000])
def test_a_checkpoint_that_does_not_fit_says_why_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    save_tensors({"state_dict": {"weight": torch.ones(3)}}, tmp_path / "rollout-000001.ckpt")
    state = {"state_dict": {"weight": torch.ones(50_000), "bias": torch.ones(7)}, "text": "x" * 300}
    for path in (tmp_path / "rollout-000001.ckpt", tmp_path / "rollout-000002.ckpt"):
        with no_file_beyond(limit), pytest.raises(OSError, match="File too large"):
            save_tensors(state, path)
    assert [path.name for path in tmp_path.iterdir()] == ["rollout-000001.ckpt"]
    assert read_checkpoint(tmp_path / "rollout-000001.ckpt")["state_dict"]["weight"].tolist() == [1.0, 1.0, 1.0]


def test_lines_are_added_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append_lines(file, "one\n")
    with no_file_beyond(10), pytest.raises(OSError, match="File too large"):
        append_lines(file, "a line that is too long\n")
    assert file.read_text() == "one\n"
    append_lines(file, "two\n")
    assert file.read_text() == "one\ntwo\n"


def test_a_run_outlives_a_full_disk_and_misses_only_what_did_not_fit(
    command_line: Any,
    small_disk: Callable[[int], Path],
    read_metrics: Callable[..., Any],
    recwarn: pytest.WarningsRecorder,
) -> None:
    checkpoint = {"every_n_rollouts": 1, "keep": 20, "keep_best": 2}
    config = command_line.config("full", data__steps=8, checkpoint=checkpoint)
    assert command_line("fit", "--config", config).status == 0
    usual = command_line.runs / "full"
    size = sum(path.stat().st_size for path in usual.rglob("*") if path.is_file())
    disk = small_disk(size // 1024 + 400)
    trainer = {"accelerator": "cpu", "val_check_interval": 2, "callbacks": _filling(disk, 3, 6)}
    config = command_line.config("full", data__steps=8, checkpoint=checkpoint, trainer=trainer)
    command_line.done("fit", "--config", config, runs=disk)
    run = disk / "full"
    assert _kept(run) == [1, 2, 6, 7, 8]
    assert all(broken(path) is None for path in run.glob("checkpoints/rollout-*.ckpt"))
    assert not list(run.rglob("*.partial"))
    assert (run / "checkpoints" / "last.ckpt").resolve().name == "rollout-000008.ckpt"
    assert read_metrics(run / "metrics.csv") == read_metrics(usual / "metrics.csv")  # caught up with
    steps = {json.loads(line)["step"] for line in (run / "completions.jsonl").read_text().splitlines()}
    assert {0, 1, 2, 6, 7} <= steps
    assert (run / "export" / "model.safetensors").exists() and (run / "report.html").exists()
    told = [str(warning.message) for warning in recwarn if "No space left on device" in str(warning.message)]
    assert sum("checkpoint not saved: No space left on device" in line for line in told) >= 3, told
    assert any(str(run / "completions.jsonl") in line or str(run / "metrics.csv") in line for line in told)


def test_an_end_that_cannot_be_exported_is_one_line_and_gone_on_with(
    command_line: Any, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(2000)
    trainer = {"accelerator": "cpu", "limit_val_batches": 0, "callbacks": _filling(disk, 2, 99)}
    config = command_line.config("end", data__steps=2, trainer=trainer, checkpoint={"every_n_rollouts": 0})
    outcome = command_line("fit", "--config", config, runs=disk)
    run = disk / "end"
    assert outcome.status == 1 and "Traceback" not in outcome.err, outcome.err
    assert outcome.err.splitlines()[-1] == f"grpo-pl fit: error: {run}: no space left; --resume goes on once there is"
    assert not list(run.glob("*export*")) and not list(run.glob(".export*"))
    assert broken(run / "checkpoints" / "rollout-000002.ckpt") is None
    (disk / "filler").unlink()
    command_line.done("fit", "--config", config, "--resume", "--trainer.callbacks=null", runs=disk)
    assert (run / "export" / "model.safetensors").exists() and (run / "report.html").exists()


def test_an_export_that_does_not_fit_keeps_the_earlier_one(command_line: Any, tmp_path: Path) -> None:
    config = command_line.config("twice", data__steps=1)
    assert command_line("fit", "--config", config).status == 0
    run = command_line.runs / "twice"
    before = {path.name: path.read_bytes() for path in (run / "export").iterdir()}
    with no_file_beyond(20_000), pytest.raises(OSError, match="File too large"):
        export(run, run / "export")
    assert {path.name: path.read_bytes() for path in (run / "export").iterdir()} == before
    assert not list(run.glob(".export-*"))
