"""What ``--model`` may be: an export, a run folder, a checkpoint; and everything else it may not be."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_pl.config.objects import build_rewards
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import ExactReward, LengthReward, PerSource


def test_an_export_brings_everything(export: Path) -> None:
    model = find_model(export)
    assert (model.name, model.context) == ("tiny", 4096)
    assert (model.sampling.max_completion_length, model.sampling.temperature) == (40, 1.0)
    assert model.template.prefill == "<think>"
    rewards = build_rewards(model.rewards)
    assert [reward.name for reward in rewards] == ["math", "format"]
    weights = load_file(export / "model.safetensors")
    for name, parameter in model.load_policy("cpu").named_parameters():
        torch.testing.assert_close(parameter, weights[name])


@pytest.mark.parametrize("inside", [".", "checkpoints/last.ckpt"])  # the newest
def test_a_checkpoint_is_served_without_an_export(export: Path, run: Path, inside: str) -> None:
    model = find_model(run / inside)
    assert (model.name, model.context) == ("my-run", 4096)
    assert (model.sampling.max_completion_length, model.sampling.temperature) == (17, 0.5)
    weights = load_file(export / "model.safetensors")
    for name, parameter in model.load_policy("cpu").named_parameters():
        torch.testing.assert_close(parameter, 10 * weights[name])


def test_a_run_folder_prefers_its_export(export: Path, run: Path) -> None:
    shutil.copytree(export, run / "export")
    model = find_model(run)
    assert model.checkpoint is None
    assert model.name == "my-run"


class _Bomb:
    def __reduce__(self) -> object:
        return (Path("/tmp/should-never-exist").touch, ())


def test_a_checkpoint_that_holds_code_is_refused(run: Path) -> None:
    path = run / "checkpoints" / "own.ckpt"
    torch.save({"state_dict": {}, "bomb": _Bomb()}, path)
    with pytest.raises(Exception, match="refused"):
        find_model(path).load_policy("cpu")
    assert not Path("/tmp/should-never-exist").exists()


def test_a_checkpoint_of_another_shape_is_refused(run: Path) -> None:
    path = run / "checkpoints" / "own.ckpt"
    torch.save({"state_dict": {"policy.other": torch.zeros(1)}}, path)
    with pytest.raises(ValueError, match="does not fit"):
        find_model(path).load_policy("cpu")


def test_nothing_to_serve_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model"):
        find_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither"):
        find_model(tmp_path)
    (tmp_path / "lone.ckpt").touch()
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_model(tmp_path / "lone.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "lone.ckpt")
    with pytest.raises(ValueError, match=r"holds no settings of its run, and .*config\.yaml is missing"):
        find_model(str(tmp_path / "lone.ckpt"))


def test_rewards_inside_rewards_are_rebuilt() -> None:
    exact = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"name": "inner"}}
    length = {"class_path": "grpo_pl.rewards.LengthReward", "init_args": {"shape": "cosine", "correct": exact}}
    parts = {"class_path": "grpo_pl.rewards.PerSource", "init_args": {"correctness": True, "rewards": {"a": exact}}}
    longer, right = build_rewards([length, parts])
    assert isinstance(longer, LengthReward) and longer.correct == ExactReward(name="inner")
    assert isinstance(right, PerSource) and right.rewards == {"a": ExactReward(name="inner")}


def test_a_reward_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no grpo_pl\.rewards\.NoSuch"):
        build_rewards([{"class_path": "grpo_pl.rewards.NoSuch"}], trust_rewards=True)
    with pytest.raises(ValueError, match="is no Reward"):
        build_rewards([{"class_path": "collections.OrderedDict"}], trust_rewards=True)
