"""Demonstrations beside rollouts: one process, DDP and FSDP2 on two learn the same, and a resume ends bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml


@pytest.fixture(scope="module")
def demonstrated(five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollouts of four optimiser steps, each of which also shows five demonstrations, an odd number."""
    tree = yaml.safe_load(five_rollouts.read_text())
    tree["model"]["algorithm"] |= {"beta": 0.0, "demonstration_coef": 0.5, "demonstration_weighting": "uncertain"}
    tree["model"]["demonstrations"] = {"batch_size": 5}
    tree["data"]["steps"] = 2
    file = tmp_path_factory.mktemp("demonstrated") / "demonstrated.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "sharded"])
def test_what_demonstrations_teach_is_that_of_one_process(
    like_one_process: Callable[..., Any], read_metrics: Callable[..., Any], demonstrated: Path, name: str
) -> None:
    single = like_one_process(name, demonstrated, rollouts=2)
    assert all(float(row["demonstration/nll"]) > 0 for row in read_metrics(single.metrics) if "reward" in row)


@pytest.mark.slow
def test_a_resumed_run_shows_the_demonstrations_that_come_next(
    completed: Callable[..., Any], command: Callable[..., Any], demonstrated: Path, tmp_path: Path
) -> None:
    whole = completed("single", demonstrated)
    resumed = whole.copy_until(1, tmp_path / "runs")
    command(tmp_path / "runs", "fit", f"--config={demonstrated}", "--resume", world=1)
    mine, theirs = resumed.state(2)["state_dict"], whole.state(2)["state_dict"]
    assert all(torch.equal(mine[key], value) for key, value in theirs.items())
