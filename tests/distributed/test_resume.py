"""k rollouts and a resume are N rollouts, bit for bit, under every strategy, and nearly so when it changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import STRATEGIES, Calls
from tests.distributed.test_episodes import ASKS, PLAY
from tests.images import LLAVA, on_images


def _assert_equal_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], value), key
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["param_groups"] == other["param_groups"]
    for number, entry in other["state"].items():
        for name, value in entry.items():
            assert torch.equal(mine["state"][number][name], value), (number, name)
    assert ours["self_teacher"].keys() == theirs["self_teacher"].keys()
    assert all(torch.equal(ours["self_teacher"][key], value) for key, value in theirs["self_teacher"].items())
    for key in ("loops", "RolloutDataModule", "tokens_seen", "skipped_in_a_row", "global_step"):
        assert ours[key] == theirs[key], key


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "name", "rollouts", "last"),
    [
        ("five", "single", 3, 5),
        ("five", "sharded", 4, 5),
        *(_slow("five", name, rollouts, 5) for name, rollouts in (("ddp", 2), ("fsdp", 1))),
        ("down", "single", 3, 4),  # episodes
        _slow("asks", "single", 2, 4),  # of an agent
        _slow("demonstrated", "single", 1, 2),
        *(_slow("seeing", name, rollouts, 5) for name, rollouts in (("ddp", 2), ("fsdp", 3), ("sharded", 4))),
        _slow("llava", "sharded", 3, 5),  # a part of its tower is frozen
        *(_slow("self_taught", name, 2, 3) for name in ("single", "fsdp", "sharded")),
    ],
)
def test_a_resumed_run_ends_bit_for_bit_like_one_that_never_stopped(
    completed: Calls,
    command: Calls,
    five_rollouts: Path,
    seeing: Path,
    feature: Calls,
    read_metrics: Calls,
    tmp_path: Path,
    kind: str,
    name: str,
    rollouts: int,
    last: int,
) -> None:
    if kind == "llava":
        config = on_images(five_rollouts, tmp_path / "llava.yaml", from_scratch=LLAVA)
    else:
        config = {"five": five_rollouts, "seeing": seeing, "down": PLAY, "asks": ASKS}.get(kind) or feature(kind)
    whole = completed(name, config)
    resumed = whole.copy_until(rollouts, tmp_path / "runs")
    flags = [f"--config={config}", *STRATEGIES[name], "--resume"]
    ended = command(tmp_path / "runs", "fit", *flags, world=1 if name == "single" else 2)
    assert f"from rollout-{rollouts:06d}.ckpt" in ended.log(0)
    _assert_equal_states(resumed.state(last), whole.state(last))
    assert read_metrics(resumed.metrics) == read_metrics(whole.metrics)
    assert resumed.samples() == [row for row in whole.samples() if row[0] >= rollouts]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("sharded", "single"),  # and from one to two: test_prefetch.py
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("single", "fsdp"), ("fsdp", "ddp"))),
    ],
)
def test_a_run_goes_on_under_another_strategy_and_number_of_processes(
    completed: Calls, command: Calls, five_rollouts: Path, tmp_path: Path, before: str, after: str
) -> None:
    resumed = completed(before).copy_until(4, tmp_path / "runs")
    flags = [f"--config={five_rollouts}", *STRATEGIES[after], "--resume"]
    command(tmp_path / "runs", "fit", *flags, world=1 if after == "single" else 2)
    assert resumed.samples() == [row for row in completed(before).samples() if row[0] >= 4]
    ours, theirs = resumed.state(5)["state_dict"], completed(before).state(5)["state_dict"]
    difference = sum((ours[key] - value).double().square().sum() for key, value in theirs.items()).sqrt()
    assert difference / sum(value.double().square().sum() for value in theirs.values()).sqrt() <= 1e-6


def test_validate_reads_a_sharded_checkpoint_in_one_process(
    completed: Calls, command: Calls, five_rollouts: Path, read_metrics: Calls, tmp_path: Path
) -> None:
    run = completed("sharded")
    assert run.checkpoint(5).is_dir()
    ended = command(tmp_path, "validate", f"--config={five_rollouts}", f"--ckpt_path={run.checkpoint(5)}", world=1)
    expected = float(read_metrics(run.metrics)[-1]["val/pass@1"])
    assert f"val/pass@1 {expected:.3f}" in ended.log(0)
