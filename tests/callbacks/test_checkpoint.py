"""When checkpoints are made, which ones stay, and what happens when one cannot be written."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.distributed.strategy import CheckpointFiles
from grpo_pl.files.checkpoints import broken
from grpo_pl.rewards import ExactReward, FormatReward


def _kept(run: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in run.glob("checkpoints/rollout-*.ckpt"))


def test_the_newest_and_the_best_stay(command_line: Any) -> None:
    config = command_line.config("keep", data__steps=6, checkpoint={"every_n_rollouts": 1, "keep": 2, "keep_best": 1})
    assert command_line("fit", "--config", config).status == 0
    run = command_line.runs / "keep"
    facts = {path.stem: json.loads(path.read_text()) for path in run.glob("checkpoints/*.json")}
    kept = _kept(run)
    assert kept[-2:] == [5, 6]
    assert len(kept) <= 3
    best = (run / "checkpoints" / "best.ckpt").resolve()
    assert facts[best.stem]["val/pass@1"] == max(f["val/pass@1"] for f in facts.values() if "val/pass@1" in f)
    assert (run / "checkpoints" / "last.ckpt").resolve().name == "rollout-000006.ckpt"
    assert all(broken(path) is None for path in run.glob("checkpoints/rollout-*.ckpt"))


def test_a_validation_makes_a_checkpoint_if_it_is_the_best(command_line: Any, read_metrics: Callable[..., Any]) -> None:
    config = command_line.config("best", checkpoint={"every_n_rollouts": 0, "keep": 1, "keep_best": 4})
    assert command_line("fit", "--config", config).status == 0
    run = command_line.runs / "best"
    validated = [int(row["step"]) for row in read_metrics(run / "metrics.csv") if "val/pass@1" in row]
    assert validated == [0, 2, 4]
    assert _kept(run) == [2, 4]


def test_checkpoints_by_the_clock(command_line: Any) -> None:
    checkpoint = {"every_n_rollouts": 0, "every_n_minutes": 1e-9, "keep": 9, "keep_best": 0}
    config = command_line.config("clock", checkpoint=checkpoint)
    assert command_line("fit", "--config", config).status == 0
    assert _kept(command_line.runs / "clock") == [1, 2, 3, 4]


def test_a_disk_that_is_full_at_the_end_is_an_error(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = command_line.config("end", checkpoint={"every_n_rollouts": 2, "keep": 9, "keep_best": 0})
    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", full)
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 1
    assert "the end of the run could not be saved: No space left on device" in outcome.err


def test_a_policy_that_diverged_names_the_newest_checkpoint(command_line: Any) -> None:
    callback = {"class_path": "user_parts.PoisonWeights", "init_args": {"rollouts": 3}}
    trainer = {"accelerator": "cpu", "limit_val_batches": 0, "callbacks": [callback]}
    config = command_line.config("nan", trainer=trainer, checkpoint={"every_n_rollouts": 2})
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 1
    line = outcome.err.splitlines()[-1]
    assert line.startswith("grpo-pl fit: error: the policy's logits are not finite")
    newest = command_line.runs / "nan" / "checkpoints" / "rollout-000002.ckpt"
    assert newest.exists() and f"The newest checkpoint is {newest};" in line


@pytest.mark.parametrize(
    "arguments", [{"every_n_rollouts": -1}, {"keep": 0}, {"keep_best": -1}, {"every_n_minutes": 0.0}]
)
def test_senseless_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        RolloutCheckpoint(**arguments)


def test_each_fit_finds_its_own_metric_and_leaves_the_argument_alone() -> None:
    class Strategy:
        def broadcast(self, value: Any) -> Any:
            return value

    class Run:
        strategy = Strategy()

    callback, kept = RolloutCheckpoint(), RolloutCheckpoint(monitor="val/mean_length")
    for rewards, metric in (([ExactReward(correctness=True)], "val/pass@1"), ([FormatReward()], "val/reward")):
        module = SimpleNamespace(rewards=rewards)
        for one, expected in ((callback, metric), (kept, "val/mean_length")):
            one.setup(Run(), module, "fit")  # type: ignore[arg-type]  # all that it reads of both
            assert one._monitored == expected
    assert callback.monitor is None


def test_resuming_takes_the_command_line_and_says_what_changed(command_line: Any) -> None:
    config = command_line.config("again")
    assert command_line("fit", "--config", config).status == 0
    outcome = command_line(
        "fit",
        "--config",
        config,
        "--resume",
        "--data.steps=5",
        "--model.optimization.lr=0.001",
        "--model.optimization.betas=[0.8,0.9]",
        "--model.optimization.weight_decay=0.5",
    )
    assert outcome.status == 0, outcome.err
    run = command_line.runs / "again"
    assert f"going on with {run} from rollout-000004.ckpt." in outcome.err
    assert "model.optimization.lr: 0.003 → 0.001" in outcome.err
    assert "data.steps: 4 → 5" in outcome.err
    (group,) = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert (group["betas"], group["weight_decay"]) == ([0.8, 0.9], 0.5) or tuple(group["betas"]) == (0.8, 0.9)
    assert group["lr"] <= 0.001
    assert "lr: 0.003" in (run / "config.1.yaml").read_text()
    assert "lr: 0.001" in (run / "config.yaml").read_text()


def test_resuming_what_never_was_starts_a_run(command_line: Any) -> None:
    config = command_line.config("first")
    command_line.done("fit", "--config", config, "--resume", "--data.steps=1")
    assert _kept(command_line.runs / "first") == [1]


def test_a_refused_checkpoint_is_one_line(command_line: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"not a checkpoint")
    for verb in ("fit", "validate"):
        outcome = command_line(verb, "--config", command_line.config("refused"), "--ckpt_path", path)
        assert outcome.status == 1
        assert "refused" in outcome.err.strip().splitlines()[-1]
    outcome = command_line("fit", "--config", command_line.config("refused"), "--ckpt_path", path, "--resume")
    assert "not both" in outcome.err
