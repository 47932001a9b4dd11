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
    config = command_line.config("keep", checkpoint={"every_n_rollouts": 1, "keep": 2, "keep_best": 1})
    command_line.done("fit", "--config", config)
    run = command_line.runs / "keep"
    facts = {path.stem: json.loads(path.read_text()) for path in run.glob("checkpoints/*.json")}
    assert _kept(run)[-2:] == [3, 4] and len(_kept(run)) <= 3
    best = (run / "checkpoints" / "best.ckpt").resolve()
    assert facts[best.stem]["val/pass@1"] == max(f["val/pass@1"] for f in facts.values() if "val/pass@1" in f)
    assert (run / "checkpoints" / "last.ckpt").resolve().name == "rollout-000004.ckpt"
    assert all(broken(path) is None for path in run.glob("checkpoints/rollout-*.ckpt"))


def test_a_validation_that_is_the_best_is_saved_and_a_resume_says_what_changed(
    command_line: Any, read_metrics: Callable[..., Any]
) -> None:
    config = command_line.config("again", checkpoint={"every_n_rollouts": 0, "keep": 1, "keep_best": 4})
    command_line.done("fit", "--config", config)
    run = command_line.runs / "again"
    validated = [int(row["step"]) for row in read_metrics(run / "metrics.csv") if "val/pass@1" in row]
    assert (validated, _kept(run)) == ([0, 2, 4], [2, 4])
    changed = ["lr=0.001", "betas=[0.8,0.9]", "weight_decay=0.5"]
    options = ["--resume", "--data.steps=5", *(f"--model.optimization.{option}" for option in changed)]
    outcome = command_line.done("fit", "--config", config, *options)
    assert f"going on with {run} from rollout-000004.ckpt." in outcome.err
    assert "model.optimization.lr: 0.003 → 0.001" in outcome.err and "data.steps: 4 → 5" in outcome.err
    (group,) = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert (tuple(group["betas"]), group["weight_decay"]) == ((0.8, 0.9), 0.5) and group["lr"] <= 0.001
    assert "lr: 0.003" in (run / "config.1.yaml").read_text()
    assert "lr: 0.001" in (run / "config.yaml").read_text()


def test_checkpoints_by_the_clock_of_a_run_that_resumes_what_never_was(command_line: Any) -> None:
    checkpoint = {"every_n_rollouts": 0, "every_n_minutes": 1e-9, "keep": 9, "keep_best": 0}
    config = command_line.config("clock", checkpoint=checkpoint)
    command_line.done("fit", "--config", config, "--data.steps=3", "--resume")
    assert _kept(command_line.runs / "clock") == [1, 2, 3]


def test_a_disk_that_is_full_at_the_end_is_an_error(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = command_line.config("end", data__steps=1, checkpoint={"every_n_rollouts": 2})
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
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda value: value))
    callback, kept = RolloutCheckpoint(), RolloutCheckpoint(monitor="val/mean_length")
    for rewards, metric in (([ExactReward(correctness=True)], "val/pass@1"), ([FormatReward()], "val/reward")):
        module: Any = SimpleNamespace(rewards=rewards)
        for one, expected in ((callback, metric), (kept, "val/mean_length")):
            one.setup(trainer, module, "fit")
            assert one._monitored == expected
    assert callback.monitor is None


def test_a_refused_checkpoint_is_one_line(command_line: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"not a checkpoint")
    given = ["--config", command_line.config("refused"), "--ckpt_path", path]
    for verb, options, told in (("fit", [], "refused"), ("validate", [], "refused"), ("fit", ["--resume"], "not both")):
        outcome = command_line(verb, *given, *options)
        assert outcome.status == 1 and told in outcome.err.strip().splitlines()[-1]
