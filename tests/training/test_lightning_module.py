"""``GRPOModule`` as a LightningModule: what is loaded from a checkpoint, asked, tested and predicted with."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ThroughputMonitor

import grpo_pl as g
from grpo_pl.config.objects import build
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.rewards.trust import Untrusted
from grpo_pl.training.module import GRPOModule

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "inference_mode": False,
}


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    outcome = command_line("fit", "--config", command_line.config("loaded", data__steps=2))
    assert outcome.status == 0, outcome.err
    return Path(command_line.runs / "loaded")


def _data(run: Path) -> RolloutDataModule:
    return build(RolloutDataModule, yaml.safe_load((run / "config.yaml").read_text())["data"], "data")


def test_a_checkpoint_holds_the_settings_of_its_module_as_plain_values(run: Path) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"] == yaml.safe_load((run / "config.yaml").read_text())["model"]


@pytest.mark.parametrize("alone", [False, True], ids=["in_its_run", "alone"])
def test_a_module_is_loaded_from_a_checkpoint_with_its_policy(run: Path, tmp_path: Path, alone: bool) -> None:
    file = run / "checkpoints/last.ckpt"
    weights = torch.load(file, weights_only=True)["state_dict"]
    if alone:
        file = Path(tmp_path / "moved.ckpt")
        file.write_bytes((run / "checkpoints/last.ckpt").resolve().read_bytes())
    module = GRPOModule.load_from_checkpoint(file, validation={"samples": 3})
    assert module.validation.samples == 3 and module.algorithm.group_size == 4
    assert [type(reward).__name__ for reward in module.rewards] == ["ExactReward", "FormatReward"]
    state = module.state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(module(ids).logits, module.require_policy()(input_ids=ids).logits)


def test_a_loaded_module_tests_and_predicts_as_its_run_validated(run: Path) -> None:
    module, data = GRPOModule.load_from_checkpoint(str(run / "checkpoints/last.ckpt")), _data(run)
    data.completed_rollouts = 2
    (tested,) = Trainer(**QUIET).test(module, data, verbose=False)
    (validated,) = Trainer(**QUIET).validate(module, data, verbose=False)
    assert {name.replace("test/", "val/"): number for name, number in tested.items()} == validated
    assert "test/pass@1" in tested and "test/unjudged" in tested
    (rows,) = Trainer(**QUIET).predict(module, data)
    assert [row["question"] for row in rows] == [problem.question for problem in data.held_out()["val"]]
    assert all(isinstance(row["completion"], str) for row in rows)
    assert sum(row["correct"] for row in rows) / len(rows) == pytest.approx(validated["val/greedy"])


def test_a_loaded_module_is_trained_further(run: Path) -> None:
    module, data = GRPOModule.load_from_checkpoint(run / "checkpoints/last.ckpt"), _data(run)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seen: list[float] = []
    callbacks = [
        LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(outputs["loss"])),
        EMAWeightAveraging(),
    ]
    Trainer(**QUIET, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False, callbacks=callbacks).fit(
        module, data
    )
    assert len(seen) == 2
    assert any(not torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_throughput_is_measured_by_lightnings_own_callback(run: Path) -> None:
    module, data = GRPOModule.load_from_checkpoint(run / "checkpoints/last.ckpt"), _data(run)
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch.prompts))
    arguments = {**QUIET, "logger": g.callbacks.metrics_csv.MetricsCSV(run / "throughput.csv")}
    Trainer(**arguments, max_epochs=1, limit_val_batches=0, log_every_n_steps=1, callbacks=[monitor]).fit(module, data)
    header, *_ = (run / "throughput.csv").read_text().splitlines()
    assert "train/samples" in header.split(",")


def test_settings_that_name_others_classes_are_refused_unless_asked_for(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    rewards = [{"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": "os:getcwd"}}]
    for field, value in (
        ("rewards", rewards),
        ("algorithm", {"class_path": "elsewhere.Algorithm"}),
        ("environment", {"class_path": "elsewhere.Environment", "init_args": {}}),
    ):
        file = Path(tmp_path / f"{field}.ckpt")
        torch.save({**checkpoint, "hyper_parameters": {**checkpoint["hyper_parameters"], field: value}}, file)
        with pytest.raises(Untrusted):
            GRPOModule.load_from_checkpoint(file)


def test_what_cannot_be_loaded_is_said_in_one_line(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    del checkpoint["hyper_parameters"]
    torch.save(checkpoint, tmp_path / "python.ckpt")
    with pytest.raises(ValueError, match=r"python\.ckpt holds no settings of its run"):
        GRPOModule.load_from_checkpoint(tmp_path / "python.ckpt")
    with pytest.raises(ValueError, match=r"export is no checkpoint: give a file of the run's folder checkpoints"):
        GRPOModule.load_from_checkpoint(run / "export")
    with pytest.raises(ValueError, match="leave out hparams_file and strict"):
        GRPOModule.load_from_checkpoint(run / "checkpoints/last.ckpt", strict=False)
