"""k rollouts and a resume are N rollouts, bit for bit, under every strategy, and nearly so when it changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

STRATEGIES = {
    "single": [],
    "ddp": ["--config=configs/strategy/ddp.yaml"],
    "fsdp": ["--config=configs/strategy/fsdp.yaml"],
    "sharded": [
        "--config=configs/strategy/fsdp.yaml",
        "--trainer.strategy.init_args.sharded_checkpoints=true",
        "--trainer.strategy.init_args.defer_gradient_sync=true",
    ],
    "tensor": ["--config=configs/strategy/tensor_parallel.yaml"],
}


def _assert_equal_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], value), key
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["param_groups"] == other["param_groups"]
    for number, entry in other["state"].items():
        for name, value in entry.items():
            assert torch.equal(mine["state"][number][name], value), (number, name)
    for key in ("loops", "RolloutDataModule", "tokens_seen", "skipped_in_a_row", "global_step"):
        assert ours[key] == theirs[key], key


@pytest.mark.parametrize(
    ("name", "rollouts"),
    [
        ("single", 1),
        ("sharded", 3),
        *(
            pytest.param(name, rollouts, marks=pytest.mark.slow)
            for name, rollouts in (("ddp", 2), ("fsdp", 4), ("tensor", 3))
        ),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_like_one_that_never_stopped(
    completed: Callable[..., Any],
    command: Callable[..., Any],
    five_rollouts: Path,
    read_metrics: Callable[..., Any],
    tmp_path: Path,
    name: str,
    rollouts: int,
) -> None:
    whole = completed(name)
    resumed = whole.copy_until(rollouts, tmp_path / "runs")
    flags = [f"--config={five_rollouts}", *STRATEGIES[name], "--resume"]
    ended = command(tmp_path / "runs", "fit", *flags, world=1 if name == "single" else 2)
    assert f"from rollout-{rollouts:06d}.ckpt" in ended.log(0)
    _assert_equal_states(resumed.state(5), whole.state(5))
    assert read_metrics(resumed.metrics) == read_metrics(whole.metrics)
    assert resumed.samples() == [row for row in whole.samples() if row[0] >= rollouts]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sharded", "single"),  # and from one to two: test_prefetch.py
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("single", "fsdp"), ("fsdp", "ddp"), ("tensor", "single"))
        ),
    ],
)
def test_a_run_goes_on_under_another_strategy_and_number_of_processes(
    completed: Callable[..., Any],
    command: Callable[..., Any],
    five_rollouts: Path,
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    resumed = completed(before).copy_until(3, tmp_path / "runs")
    flags = [f"--config={five_rollouts}", *STRATEGIES[after], "--resume"]
    command(tmp_path / "runs", "fit", *flags, world=1 if after == "single" else 2)
    assert resumed.samples() == [row for row in completed(before).samples() if row[0] >= 3]
    ours, theirs = resumed.state(5)["state_dict"], completed(before).state(5)["state_dict"]
    difference = sum((ours[key] - value).double().square().sum() for key, value in theirs.items()).sqrt()
    assert difference / sum(value.double().square().sum() for value in theirs.values()).sqrt() <= 1e-6


def test_validate_reads_a_sharded_checkpoint_in_one_process(
    completed: Callable[..., Any],
    command: Callable[..., Any],
    five_rollouts: Path,
    read_metrics: Callable[..., Any],
    tmp_path: Path,
) -> None:
    run = completed("sharded")
    assert run.checkpoint(5).is_dir()
    ended = command(tmp_path, "validate", f"--config={five_rollouts}", f"--ckpt_path={run.checkpoint(5)}", world=1)
    expected = float(read_metrics(run.metrics)[-1]["val/pass@1"])
    assert f"val/pass@1 {expected:.3f}" in ended.log(0)
