"""Supervised fine-tuning: two processes train what one does, whatever their shares, and resume it."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.conftest import Calls, assert_nearly_equal
from tests.training.test_sft_module import write_config


def _sft(folder: Path, *args: object) -> int:
    from grpo_pl.cli.main import main

    os.environ["HF_HUB_OFFLINE"] = "1"
    return main(["sft", *map(str, args), f"--runs_dir={folder}"])


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_fine_tune_as_one(in_processes: Calls, read_metrics: Calls, tmp_path: Path, name: str) -> None:
    """One of them has no held-out row in the last slice, and the two cut different numbers of micro-batches."""
    file = write_config(tmp_path, data={"steps": 4, "rows_per_step": 4})
    overlay = f"--config=configs/strategy/{name}.yaml"
    in_processes(_sft, tmp_path / "one", f"--config={file}", "--data.val_rows=9", world=1)
    in_processes(_sft, tmp_path / "two", f"--config={file}", "--data.val_rows=9", overlay)
    one, two = (tmp_path / folder / "tuned" for folder in ("one", "two"))
    assert_nearly_equal(read_metrics(two / "metrics.csv"), read_metrics(one / "metrics.csv"))
    before, after = (load_file(run / "export" / "model.safetensors") for run in (one, two))
    assert before.keys() == after.keys()
    difference = sum((after[key] - value).double().square().sum() for key, value in before.items()) ** 0.5
    assert difference / sum(value.double().square().sum() for value in before.values()) ** 0.5 <= 1e-5
