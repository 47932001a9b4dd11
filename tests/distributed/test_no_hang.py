"""Processes with unequal work wait for each other where they must, and end together whatever happens to one."""

import os
import signal
import time
from pathlib import Path

import pytest

from grpo_pl.files.checkpoints import newest_whole, rollouts_of
from tests.distributed.conftest import STRATEGIES, Calls, grpo_pl

FSDP = "--config=configs/strategy/fsdp.yaml"


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_dynamic_sampling_and_unequal_lengths_do_not_hang(
    command: Calls, five_rollouts: Path, read_metrics: Calls, tmp_path: Path, strategy: str
) -> None:
    """With transformers' own ``generate`` every rank makes as many forward passes as its longest completion needs."""
    flags = [
        f"--config=configs/strategy/{strategy}.yaml",
        "--model.engine=grpo_pl.rollout.plain.PlainEngine",
        "--model.algorithm.dynamic_sampling=true",
        "--model.algorithm.max_resample_attempts=2",
        "--model.algorithm.beta=0",  # rows without advantage are skipped, so ranks have unequal numbers of them
        "--data.steps=3",
        "--data.prompts_per_step=2",
        "--data.val_prompts=3",
        "--data.val_batch_size=1",
    ]
    command(tmp_path / "runs", "fit", f"--config={five_rollouts}", *flags)
    rows = read_metrics(tmp_path / "runs" / "five" / "metrics.csv")
    trained = [row for row in rows if "reward" in row]
    assert [row["step"] for row in trained] == ["1", "2", "3"]
    assert any(float(row["samples/resample_attempts"]) > 0 for row in trained)
    assert any(row["completions/min_length"] != row["completions/max_length"] for row in trained)


def test_sigterm_to_one_process_ends_both_with_a_checkpoint(
    start: Calls, command: Calls, completed: Calls, five_rollouts: Path, read_metrics: Calls, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "five"
    flags = ["fit", f"--config={five_rollouts}", *STRATEGIES["sharded"], "--checkpoint.every_n_rollouts=100"]
    processes, finish = start(grpo_pl, tmp_path / "runs", *flags, "--model.engine=user_parts.Slow")
    while not (run / "metrics.csv").exists() or ",0." not in (run / "metrics.csv").read_text().split("\n", 3)[-1]:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGTERM)
    ended = finish()
    assert ended.status == [143, 143], ended.log(0) + ended.log(1)
    checkpoint = newest_whole(run / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None
    stopped = rollouts_of(checkpoint)
    assert 1 <= stopped < 5
    rows = read_metrics(run / "metrics.csv")
    assert max(int(row["step"]) for row in rows) == stopped  # the rollout that was cut short left no trace
    command(tmp_path / "runs", *flags, "--resume")
    assert read_metrics(run / "metrics.csv") == read_metrics(completed("sharded").metrics)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_reward_that_fails_in_one_process_is_told_first_and_both_save_and_end(
    start: Calls, five_rollouts: Path, tmp_path: Path, strategy: str
) -> None:
    flags = [f"--config=configs/strategy/{strategy}.yaml", "--checkpoint.every_n_rollouts=100"]
    failing = "{class_path: user_parts.Failing, init_args: {call: 2, rank: 1}}"
    _, finish = start(
        grpo_pl, tmp_path / "runs", "fit", f"--config={five_rollouts}", *flags, f"--model.rewards+={failing}"
    )
    ended = finish()
    assert ended.status == [1, 1]  # None: still running
    assert "[rank 1] RuntimeError: the service is down" in ended.log(1)
    saved = tmp_path / "runs" / "five" / "checkpoints" / "rollout-000001.ckpt"
    assert newest_whole(saved.parent, warn=pytest.fail) == saved
    for rank in (0, 1):
        last = ended.log(rank).splitlines()[-1]
        assert "RuntimeError: the service is down, raised by the reward 'failing'" in last and f"Saved: {saved}" in last


def test_a_process_that_is_killed_takes_the_other_with_it(start: Calls, five_rollouts: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "five" / "metrics.csv"
    flags = [f"--config={five_rollouts}", FSDP, "--data.steps=200", "--trainer.limit_val_batches=0"]
    processes, finish = start(grpo_pl, tmp_path / "runs", "fit", *flags)
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    os.kill(processes[1].pid, signal.SIGKILL)
    ended = finish()
    assert ended.status[1] == -signal.SIGKILL and ended.status[0] not in (None, 0), ended.log(0)
