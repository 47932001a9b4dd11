"""Reward models: two processes train and renew one as one process does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.training.reward_model import RewardModelModule, load_classifier, save_classifier
from tests.callbacks.test_renewal import JUDGE
from tests.training.test_reward_model import CONFIG, SHAPE

SLOW = pytest.param("fsdp", marks=pytest.mark.slow)


def _fit(folder: Path, *args: object) -> int:
    from grpo_pl.cli.main import main

    os.environ["HF_HUB_OFFLINE"] = "1"
    return main(["fit", *map(str, args), f"--runs_dir={folder}"])


@pytest.mark.parametrize("name", ["ddp", SLOW])
def test_two_processes_train_the_reward_model_of_one(
    in_processes: Callable[..., Any], read_metrics: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "scorer.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "data": {**CONFIG["data"], "steps": 4}}))
    overlay = f"--config=configs/strategy/{name}.yaml"
    in_processes(_fit, tmp_path / "one", f"--config={file}", world=1)
    in_processes(_fit, tmp_path / "two", f"--config={file}", overlay)
    one, two = (read_metrics(tmp_path / folder / "scorer" / "metrics.csv") for folder in ("one", "two"))
    for mine, theirs in zip(two, one, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert float(mine[key]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), key
    before, after = (
        load_file(tmp_path / folder / "scorer" / "export" / "model.safetensors") for folder in ("one", "two")
    )
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_renew_the_reward_model_of_one(
    like_one_process: Callable[..., Any],
    read_metrics: Callable[..., Any],
    five_rollouts: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "renewed_model"
    file = folder / "renewed.yaml"
    if not file.exists():
        config = PolicyConfig(from_scratch=SHAPE)
        model = load_classifier(config, tokenizer := RewardModelModule(config).tokenizer)
        save_classifier(model.config, model.state_dict(), tokenizer, folder / "model", True)
        tree = yaml.safe_load(five_rollouts.read_text())
        settings = {"every": 1, "steps": 2, "pairs_per_step": 4, "lr": 0.01, "judge": JUDGE}
        callback = {"class_path": "grpo_pl.callbacks.renewal.RenewRewardModel", "init_args": settings}
        reward = {"class_path": "grpo_pl.rewards.ModelReward", "init_args": {"model": str(folder / "model")}}
        tree["trainer"]["callbacks"] = [callback]
        tree["model"]["rewards"] += [{**reward, "init_args": {**reward["init_args"], "max_length": 64}}]
        tree["data"]["steps"] = 3
        file.write_text(yaml.safe_dump(tree))
    single = like_one_process(name, file, rollouts=3)
    assert all(float(row["reward_model/pairs"]) > 0 for row in read_metrics(single.metrics) if "loss" in row)
