"""A policy that teaches itself: one process, DDP and FSDP2 on two learn the same, and a resume ends bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.conftest import STRATEGIES

ROLLOUTS = 3


@pytest.fixture(scope="module")
def self_taught(five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rollouts beside the reward: the teacher is a moving average that reads a better sibling or the answer."""
    tree = yaml.safe_load(five_rollouts.read_text())
    tree["model"]["privileged"] = {"user": "{question}{privileged}", "texts": ["{best} ", "{answer} "]}
    tree["model"]["policy"]["from_scratch"]["max_position_embeddings"] = 96
    tree["model"]["max_tokens_per_microbatch"] = 96
    tree["model"]["algorithm"] |= {
        "beta": 0.0,
        "distillation": "jensen_shannon",
        "teacher_weights": "average",
        "teacher_rate": 0.5,
    }
    tree["data"]["steps"] = ROLLOUTS
    file = tmp_path_factory.mktemp("self_taught") / "self_taught.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "sharded"])
def test_what_a_policy_learns_from_itself_is_that_of_one_process(
    like_one_process: Callable[..., Any],
    completed: Callable[..., Any],
    read_metrics: Callable[..., Any],
    self_taught: Path,
    name: str,
) -> None:
    single = like_one_process(name, self_taught, rollouts=ROLLOUTS)
    distances = [float(row["teacher/divergence"]) for row in read_metrics(single.metrics) if "reward" in row]
    assert len(distances) == ROLLOUTS and min(distances) > 0
    ours, theirs = (run.state(ROLLOUTS)["self_teacher"] for run in (completed(name, self_taught), single))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)
    weights = single.state(ROLLOUTS)["state_dict"]
    assert any(not torch.equal(value, weights[f"policy.{key}"]) for key, value in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "fsdp", "sharded"])
def test_a_resumed_run_goes_on_with_the_same_average(
    completed: Callable[..., Any],
    command: Callable[..., Any],
    read_metrics: Callable[..., Any],
    self_taught: Path,
    tmp_path: Path,
    name: str,
) -> None:
    whole = completed(name, self_taught)
    resumed = whole.copy_until(2, tmp_path / "runs")
    flags = [f"--config={self_taught}", *STRATEGIES.get(name, []), "--resume"]
    ended = command(tmp_path / "runs", "fit", *flags, world=1 if name == "single" else 2)
    assert "from rollout-000002.ckpt" in ended.log(0)
    for part in ("state_dict", "self_teacher"):
        mine, theirs = resumed.state(ROLLOUTS)[part], whole.state(ROLLOUTS)[part]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], value) for key, value in theirs.items()), part
    assert read_metrics(resumed.metrics) == read_metrics(whole.metrics)
