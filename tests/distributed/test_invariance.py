"""One process, DDP or FSDP2 on two, and tensor parallelism on two or four are the same training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_pl.files.checkpoints import policy_weights

SLOW = ("ddp", "fsdp", "tensor", "tensor_of_4")
ALL = ("sharded", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
"""DDP by default: test_episodes.py (samples and metrics)."""


@pytest.mark.parametrize("name", ALL)
def test_all_samples_are_those_of_one_process(completed: Callable[..., Any], name: str) -> None:
    ours, single = completed(name).samples(), completed("single").samples()
    assert len(single) == 5 * 4
    near_ties = sum(mine != theirs for mine, theirs in zip(ours, single, strict=True))
    assert near_ties == 0


@pytest.mark.parametrize("name", ALL)
def test_metrics_of_every_step_are_those_of_one_process(
    completed: Callable[..., Any], read_metrics: Callable[..., Any], name: str
) -> None:
    ours, single = (read_metrics(completed(which).metrics) for which in (name, "single"))
    assert [row.keys() for row in ours] == [row.keys() for row in single]
    assert [row["step"] for row in single] == ["0", "1", "2", "2", "3", "4", "4", "5", "5"]
    for mine, theirs in zip(ours, single, strict=True):
        for key, value in theirs.items():
            assert float(mine[key]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), (key, theirs["step"])


@pytest.mark.parametrize("name", ALL)
def test_final_weights_are_those_of_one_process(completed: Callable[..., Any], name: str) -> None:
    single, ours = completed("single").state(5)["state_dict"], completed(name).state(5)["state_dict"]
    assert ours.keys() == single.keys()
    difference = sum((ours[key] - value).double().square().sum() for key, value in single.items()).sqrt()
    norm = sum(value.double().square().sum() for value in single.values()).sqrt()
    assert difference / norm <= 1e-5
    start = completed("single").state(1)["state_dict"]
    moved = sum((start[key] - value).double().square().sum() for key, value in single.items()).sqrt()
    assert moved / norm > 1e-3  # or equality would mean little


@pytest.mark.parametrize("name", ALL)
def test_optimiser_state_is_that_of_one_process(completed: Callable[..., Any], name: str) -> None:
    """Also that a sharded checkpoint, put together, numbers parameters as the optimiser of one process does."""
    single = completed("single").state(5)["optimizer_states"][0]["state"]
    ours = completed(name).state(5)["optimizer_states"][0]["state"]
    assert ours.keys() == single.keys()
    for number, entry in single.items():
        torch.testing.assert_close(ours[number]["exp_avg"], entry["exp_avg"], rtol=1e-3, atol=1e-6)
        assert float(ours[number]["step"]) == float(entry["step"]) == 20.0


@pytest.mark.parametrize("name", ("single", *ALL))
def test_the_exported_model_is_that_of_the_last_checkpoint(completed: Callable[..., Any], name: str) -> None:
    exported = load_file(completed(name).path / "export" / "model.safetensors")
    weights = policy_weights(completed(name).state(5))
    assert weights.keys() - exported.keys() == {"lm_head.weight"}  # tied to the embedding
    for key, value in exported.items():
        assert torch.equal(weights[key], value), key
