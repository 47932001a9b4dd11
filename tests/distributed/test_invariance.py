"""One process, and DDP or FSDP2 on two, are the same training."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_pl.files.checkpoints import policy_weights
from tests.distributed.conftest import Calls

SLOW = ("ddp", "fsdp")
ALL = ("sharded", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
"""DDP by default: test_episodes.py (samples and metrics)."""


@pytest.mark.parametrize("name", ALL)
def test_samples_metrics_and_weights_are_those_of_one_process(
    like_one_process: Calls, read_metrics: Calls, five_rollouts: Path, name: str
) -> None:
    single = like_one_process(name, five_rollouts, rollouts=5)
    assert len(single.samples()) == 5 * 4
    assert [row["step"] for row in read_metrics(single.metrics)] == ["0", "1", "2", "2", "3", "4", "4", "5", "5"]
    weights, start = (single.state(rollouts)["state_dict"] for rollouts in (5, 1))
    moved = sum((start[key] - value).double().square().sum() for key, value in weights.items()).sqrt()
    norm = sum(value.double().square().sum() for value in weights.values()).sqrt()
    assert moved / norm > 1e-3  # or equality would mean little


@pytest.mark.parametrize("name", ALL)
def test_optimiser_state_is_that_of_one_process(completed: Calls, name: str) -> None:
    """Also that a sharded checkpoint, put together, numbers parameters as the optimiser of one process does."""
    single = completed("single").state(5)["optimizer_states"][0]["state"]
    ours = completed(name).state(5)["optimizer_states"][0]["state"]
    assert ours.keys() == single.keys()
    for number, entry in single.items():
        torch.testing.assert_close(ours[number]["exp_avg"], entry["exp_avg"], rtol=1e-3, atol=1e-6)
        assert float(ours[number]["step"]) == float(entry["step"]) == 20.0


@pytest.mark.parametrize("name", ("single", *ALL))
def test_the_exported_model_is_that_of_the_last_checkpoint(completed: Calls, name: str) -> None:
    exported = load_file(completed(name).path / "export" / "model.safetensors")
    weights = policy_weights(completed(name).state(5))
    assert weights.keys() - exported.keys() == {"lm_head.weight"}  # tied to the embedding
    for key, value in exported.items():
        assert torch.equal(weights[key], value), key
