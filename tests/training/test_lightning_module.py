"""``GRPOModule`` as a LightningModule: what is loaded from a checkpoint, asked, tested and predicted with."""

import sys
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
"""Arguments of a Trainer that leaves nothing behind."""


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    command_line.done("fit", "--config", command_line.config("loaded", data__steps=2))
    return Path(command_line.runs / "loaded")


def _data(run: Path) -> RolloutDataModule:
    return build(RolloutDataModule, yaml.safe_load((run / "config.yaml").read_text())["data"], "data")


def test_a_checkpoint_holds_the_settings_of_its_module_as_plain_values(run: Path) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["settings"] == yaml.safe_load((run / "config.yaml").read_text())["model"]


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
    assert [row["prompt_id"] for row in rows] == [problem.id for problem in data.held_out()["val"]]
    assert all(isinstance(row["completion"], str) for row in rows)
    assert sum(row["correct"] for row in rows) / len(rows) == pytest.approx(validated["val/greedy"])


def test_a_loaded_module_is_trained_further_with_the_reference_that_it_needs(run: Path) -> None:
    module = GRPOModule.load_from_checkpoint(run / "checkpoints/last.ckpt", algorithm={"group_size": 4, "beta": 0.1})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seen: list[dict[str, Any]] = []
    callback = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(outputs))
    Trainer(**QUIET, max_epochs=1, limit_val_batches=0, callbacks=[callback]).fit(module, _data(run))
    assert [torch.is_tensor(outputs["loss"]) for outputs in seen] == [True, True]
    assert all(outputs["experience"].ref_logprobs is not None for outputs in seen)
    assert any(not torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_the_average_of_the_weights_is_what_is_left_where_that_is_asked_for(run: Path) -> None:
    file = run / "checkpoints/last.ckpt"
    start = GRPOModule.load_from_checkpoint(file).require_policy().get_input_embeddings().weight.detach().clone()
    after = []
    for callbacks in ([], [EMAWeightAveraging(decay=0.5)]):
        module = GRPOModule.load_from_checkpoint(file)
        Trainer(**QUIET, max_epochs=1, val_check_interval=1, check_val_every_n_epoch=None, callbacks=callbacks).fit(
            module, _data(run)
        )
        after.append(module.require_policy().get_input_embeddings().weight.detach())
    newest, average = after
    assert 0 < (average - start).norm() < (newest - start).norm()


def test_an_average_beside_copies_of_the_weights_is_refused(run: Path) -> None:
    module = GRPOModule.load_from_checkpoint(
        run / "checkpoints/last.ckpt", engine={"class_path": "grpo_pl.extras.engines.native_child.NativeChildEngine"}
    )
    with pytest.raises(ValueError, match="averaged weights go with an engine that reads the policy's own"):
        Trainer(**QUIET, max_epochs=1, callbacks=[EMAWeightAveraging()]).fit(module, _data(run))


def test_throughput_is_measured_by_lightnings_own_callback(run: Path) -> None:
    module, data = GRPOModule.load_from_checkpoint(run / "checkpoints/last.ckpt"), _data(run)
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch.prompts))
    arguments = {**QUIET, "logger": g.callbacks.metrics_csv.MetricsCSV(run / "throughput.csv")}
    Trainer(**arguments, max_epochs=1, limit_val_batches=0, log_every_n_steps=1, callbacks=[monitor]).fit(module, data)
    header, *_ = (run / "throughput.csv").read_text().splitlines()
    assert "train/samples" in header.split(",")


class Mine(GRPOModule):
    """A user's own."""

    rollouts = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rollouts += 1


class MyData(RolloutDataModule):
    """A user's own."""


def test_subclasses_train_in_double_precision_and_are_saved_by_the_trainer(run: Path, tmp_path: Path) -> None:
    data = build(MyData, yaml.safe_load((run / "config.yaml").read_text())["data"], "data")
    reused = {"group_size": 4, "beta": 0.1, "num_iterations": 2}  # a reference, and log-probabilities from before
    module = Mine.load_from_checkpoint(run / "checkpoints/last.ckpt", algorithm=reused)
    trainer = Trainer(**QUIET, max_epochs=1, limit_val_batches=0, limit_train_batches=1, precision="64-true")
    trainer.fit(module, data)
    assert (type(module), module.rollouts) == (Mine, 1)
    weights = {name: weight.clone() for name, weight in module.state_dict().items()}
    assert {weight.dtype for weight in module.require_policy().parameters()} == {torch.float64}
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    saved = torch.load(tmp_path / "own.ckpt", weights_only=True)
    assert saved["MyData"]["completed_rollouts"] == 1
    assert all(torch.equal(saved["state_dict"][name], weight) for name, weight in weights.items())
    data.completed_rollouts = 0
    other = Mine.load_from_checkpoint(run / "checkpoints/last.ckpt")
    Trainer(**QUIET, precision="64-true").validate(other, data, ckpt_path=tmp_path / "own.ckpt", verbose=False)
    rounded = {name: weight.float().double() for name, weight in weights.items()}  # read before they become float64
    assert all(torch.equal(other.state_dict()[name], weight) for name, weight in rounded.items())


TOOLS = "grpo_pl.extras.agents.tools.ToolEnvironment"


@pytest.mark.parametrize(
    "hostile",
    [
        {"rewards": [{"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": "os:getcwd"}}]},
        {"rewards": "rewards.yaml"},
        {"algorithm": {"class_path": "elsewhere.Algorithm"}},
        {"algorithm": "elsewhere.Algorithm"},
        {"algorithm": {"baseline": "elsewhere.Estimator"}},
        {"algorithm": {"baseline": {"class_path": "elsewhere.Estimator"}}},
        {"algorithm.class_path": "elsewhere.Algorithm"},
        {"engine.class_path": "elsewhere.Engine"},
        {"environment": {"class_path": "elsewhere.Environment", "init_args": {}}},
        {"environment.class_path": TOOLS, "environment.init_args": {"tools": ["os:system"]}},
        {"rewards+": [{"class_path": "elsewhere.Reward"}]},
        {"policy": {"from_scratch": {}, "lora.class_path": "elsewhere.Lora"}},
        {"template": "template.yaml"},
        {"teachers": {"one": "teacher.yaml"}},
        {"teacher": {"model": {"path": "x", "lora": "lora.yaml"}}},
        {"teacher": {"model": {"path": "x", "attn_implementation": "elsewhere/kernel"}}},
        {"template": {"examples": ["examples.yaml"]}},
        {"optimization": "optimization.yaml"},
    ],
    ids=str,
)
@pytest.mark.parametrize("weights_only", [None, True])
def test_settings_that_may_name_code_are_refused(
    run: Path, tmp_path: Path, hostile: dict[str, Any], weights_only: bool | None
) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    torch.save({**checkpoint, "settings": {**checkpoint["settings"], **hostile}}, tmp_path / "strange.ckpt")
    with pytest.raises(ValueError, match=r"code|trust|fields alone|must be|list of objects"):
        GRPOModule.load_from_checkpoint(tmp_path / "strange.ckpt", weights_only=weights_only)
    assert "elsewhere" not in sys.modules


def test_settings_of_a_friend_may_name_any_class(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    (tmp_path / "mine.py").write_text("def half(completions):\n    return [0.5 for _ in completions]\n")
    function = {"function": f"{tmp_path / 'mine.py'}:half", "weight": 0.0}
    own = {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": function}
    settings = {**checkpoint["settings"], "rewards": [*checkpoint["settings"]["rewards"], own]}
    file = tmp_path / "friend.ckpt"
    torch.save({**checkpoint, "settings": settings}, file)
    with pytest.raises(Untrusted, match=r"friend\.ckpt: .*Here that is weights_only=False\.$"):
        GRPOModule.load_from_checkpoint(file)
    assert len(GRPOModule.load_from_checkpoint(file, weights_only=False).rewards) == 3


def test_what_cannot_be_loaded_is_said_in_one_line(run: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    del checkpoint["settings"]
    torch.save(checkpoint, tmp_path / "python.ckpt")
    with pytest.raises(ValueError, match=r"python\.ckpt holds no settings of its run"):
        GRPOModule.load_from_checkpoint(tmp_path / "python.ckpt")
    with pytest.raises(ValueError, match=r"export is no checkpoint: give a file of the run's folder checkpoints"):
        GRPOModule.load_from_checkpoint(run / "export")
    torch.save({**checkpoint, "settings": ["x"]}, tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match=r"list\.ckpt: settings must be an object with fields"):
        GRPOModule.load_from_checkpoint(tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="leave out hparams_file and strict"):
        GRPOModule.load_from_checkpoint(run / "checkpoints/last.ckpt", strict=False)
