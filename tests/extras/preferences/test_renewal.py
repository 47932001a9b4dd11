"""A reward model that learns on during RL: on pairs of a judge or a file, resumed bit by bit, and watched."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_pl.extras.preferences import renewal
from grpo_pl.extras.preferences.pairs import Preference
from grpo_pl.extras.preferences.renewal import RenewRewardModel
from grpo_pl.extras.preferences.reward_model import RewardModelModule, load_classifier, pair_scores, save_classifier
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import LengthReward, ModelReward
from grpo_pl.training.optimization import TrainingDiverged
from tests.extras.preferences.test_reward_model import SHAPE
from tests.training.runs import resumed

JUDGE = {
    "class_path": "grpo_pl.rewards.LengthReward",
    "init_args": {"shape": "overlong", "max_length": 32, "cache_length": 32},
}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that has not been trained."""
    config = PolicyConfig(from_scratch=SHAPE)
    tokenizer = RewardModelModule(config).tokenizer
    model = load_classifier(config, tokenizer)
    folder = tmp_path_factory.mktemp("reward") / "model"
    save_classifier(model.config, model.state_dict(), tokenizer, folder, True)
    return folder


def _config(command_line: Any, reward_model: Path, name: str = "renewed", **settings: Any) -> Path:
    callback = {"reward": "model", "every": 1, "steps": 3, "pairs_per_step": 4, "lr": 0.01, "judge": JUDGE, **settings}
    rewards = [
        {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"weight": 0.1}},
        {"class_path": "grpo_pl.rewards.ModelReward", "init_args": {"model": str(reward_model), "max_length": 64}},
    ]
    callbacks = [{"class_path": "grpo_pl.extras.preferences.renewal.RenewRewardModel", "init_args": callback}]
    return Path(command_line.config(name, model__rewards=rewards, trainer__callbacks=callbacks, data__steps=3))


def test_a_resumed_run_renews_as_one_that_was_not_interrupted(
    command_line: Any, reward_model: Path, read_metrics: Callable[..., Any]
) -> None:
    config = _config(command_line, reward_model)
    command_line.done("fit", "--config", config)
    run = command_line.runs / "renewed"
    rest, whole = resumed(command_line, read_metrics, run)
    assert all(float(row["reward_model/pairs"]) > 0 for row in whole)
    assert {"reward_model/agreement", "reward_model/agreement_low", "reward_model/loss"} <= whole[0].keys()
    before, after = (load_file(folder / "model.safetensors") for folder in (reward_model, run / "reward_model"))
    assert not torch.equal(before["score.weight"], after["score.weight"])
    again = load_file(rest / "reward_model" / "model.safetensors")
    assert all(torch.equal(after[name], again[name]) for name in after)
    # a validation scores with the weights of its checkpoint
    output = command_line.folder / "validated.json"
    ending = ("--ckpt_path", run / "checkpoints" / "last.ckpt", "--output", output)
    assert command_line("validate", "--config", config, *ending).status == 0
    measured = json.loads(output.read_text())["metrics"]["val/rewards/model"]["value"]
    (first, *_, last) = [row for row in read_metrics(run / "metrics.csv") if "val/rewards/model" in row]
    assert measured == pytest.approx(float(last["val/rewards/model"]), rel=1e-4)
    assert measured != pytest.approx(float(first["val/rewards/model"]), rel=0.1)


def test_a_renewal_goes_over_its_pairs_pass_by_pass(reward_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Preference] = []

    def noted(model: Any, tokenizer: Any, pairs: Any, **options: Any) -> Any:
        shown.extend(pairs)
        return pair_scores(model, tokenizer, pairs, **options)

    monkeypatch.setattr(renewal, "pair_scores", noted)
    renewing = RenewRewardModel(judge=LengthReward(), steps=3, pairs_per_step=4)
    reward = ModelReward(model=str(reward_model), max_length=64)
    renewing._optimizer = renewing.optimization.build(reward.loaded[0].parameters())
    fresh = [Preference(f"{i}+1=", "short", "much longer") for i in range(16)]
    orders = []
    for _ in range(2):
        shown.clear()
        renewing._held_out = []
        renewing._renew(reward, fresh, seed=0)
        orders.append(shown[4:])  # after those that are held out
        assert sorted(orders[-1]) == sorted(pair for i, pair in enumerate(fresh) if i % 4)
    assert orders[0] != orders[1]


def test_a_loss_that_is_not_finite_ends_the_run(reward_model: Path) -> None:
    renewing = RenewRewardModel(judge=LengthReward(), lr=1e36)
    reward = ModelReward(model=str(reward_model), max_length=64)
    renewing._optimizer = renewing.optimization.build(reward.loaded[0].parameters())
    with pytest.raises(TrainingDiverged, match="step 2 of a renewal of the reward model 'model'"):
        renewing._renew(reward, [Preference("1+1=", "short", "much longer")] * 4, seed=0)


def test_new_rows_of_a_file_are_used_once(command_line: Any, reward_model: Path, read_metrics: Any) -> None:
    """And a model whose files are in half precision is trained in float32."""
    half = command_line.folder / "half"
    AutoModelForSequenceClassification.from_pretrained(reward_model).bfloat16().save_pretrained(half)
    AutoTokenizer.from_pretrained(reward_model).save_pretrained(half)
    file = command_line.folder / "people.jsonl"
    rows = [{"prompt": f"{i}+1=", "chosen": "short", "rejected": "much longer"} for i in range(12)]
    half_written = '{"prompt": "13+'
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + half_written)
    config = _config(command_line, half, "people", judge=None, preferences=str(file))
    assert command_line("fit", "--config", config, "--data.steps=2").status == 0
    found = [row for row in read_metrics(command_line.runs / "people" / "metrics.csv") if "loss" in row]
    assert [float(row["reward_model/pairs"]) for row in found] == [12.0, 0.0]
    assert "reward_model/loss" not in found[1]
    (state,) = (
        state
        for name, state in read_checkpoint(command_line.runs / "people" / "checkpoints" / "last.ckpt")[
            "callbacks"
        ].items()
        if name.startswith("RenewRewardModel")
    )
    assert state["rows"] == 12 and len(state["held_out"]) == 3
    weights = load_file(command_line.runs / "people" / "reward_model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    file.write_text(half_written + "\n")
    broken = command_line("fit", "--config", config, "--data.steps=2", "--name=broken")
    assert broken.status == 1 and "line 1 of" in broken.err.splitlines()[-1], broken.err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reward": "other"}, "RenewRewardModel.reward is 'other'; the ModelRewards of this run are: model"),
        (
            {"judge": {"class_path": "grpo_pl.rewards.ModelReward", "init_args": {"model": "./nowhere"}}},
            "error: cannot load the model: there is no folder './nowhere'",  # a rollout would ask for its tokenizer
        ),
        ({"judge": None, "preferences": "nowhere.jsonl"}, "RenewRewardModel.preferences: no such file: nowhere.jsonl"),
    ],
)
def test_what_cannot_be_renewed_ends_in_one_line(
    command_line: Any, reward_model: Path, settings: dict[str, Any], told: str
) -> None:
    run = command_line("fit", "--config", _config(command_line, reward_model, "refused", **settings))
    assert run.status in (1, 2) and told in run.err.splitlines()[-1], run.err


def test_two_rewards_have_states_and_folders_of_their_own() -> None:
    one, two = (RenewRewardModel(reward=name, judge=LengthReward()) for name in ("model", "taste"))
    assert one.state_key != two.state_key
    assert (one._prefix, two._prefix) == ("reward_model", "reward_taste")


@pytest.mark.parametrize("given", [{}, {"judge": LengthReward(), "preferences": "pairs.jsonl"}])
def test_pairs_are_decided_by_one_of_judge_and_file(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one of judge and preferences"):
        RenewRewardModel(**given)
