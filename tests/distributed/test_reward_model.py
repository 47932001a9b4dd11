"""Reward models: two processes train one as one process does."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.distributed.conftest import Calls, assert_nearly_equal
from tests.extras.preferences.test_reward_model import CONFIG


def _fit(folder: Path, *args: object) -> int:
    from grpo_pl.cli.main import main

    os.environ["HF_HUB_OFFLINE"] = "1"
    return main(["fit", *map(str, args), f"--runs_dir={folder}"])


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_the_reward_model_of_one(
    in_processes: Calls, read_metrics: Calls, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "scorer.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "data": {**CONFIG["data"], "steps": 4}}))
    overlay = f"--config=configs/strategy/{name}.yaml"
    pairs = "--data.val_pairs=33"  # of which one process has none in the last slice
    in_processes(_fit, tmp_path / "one", f"--config={file}", pairs, world=1)
    in_processes(_fit, tmp_path / "two", f"--config={file}", pairs, overlay)
    one, two = (read_metrics(tmp_path / folder / "scorer" / "metrics.csv") for folder in ("one", "two"))
    assert_nearly_equal(two, one)
    before, after = (
        load_file(tmp_path / folder / "scorer" / "export" / "model.safetensors") for folder in ("one", "two")
    )
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5)
