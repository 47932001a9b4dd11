"""DPPO over the likeliest tokens: DDP on two processes and FSDP2 on two bound the update as one process does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bounded(five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollouts, the second half of each learned from after an update, within a narrow trust region."""
    tree = yaml.safe_load(five_rollouts.read_text())
    region = {"surrogate": "dppo_tv", "epsilon_low": 0.01, "epsilon_high": 0.01, "trust_region_top_k": 5}
    tree["model"]["algorithm"] |= {"beta": 0.0, "num_minibatches": 2, **region}
    tree["data"]["steps"] = 2
    file = tmp_path_factory.mktemp("bounded") / "bounded.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_likely_tokens_bound_the_update_as_in_one_process(
    like_one_process: Callable[..., Any], read_metrics: Callable[..., Any], bounded: Path, name: str
) -> None:
    single = like_one_process(name, bounded, rollouts=2)
    assert any(float(row.get("clip_ratio/region_mean", 0)) > 0 for row in read_metrics(single.metrics))
