"""Reward models: trained by the command line, exported, read by ``ModelReward``, resumed bit by bit; faults."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_pl.extras.preferences.pairs import BrevityPreferences
from grpo_pl.extras.preferences.reward_model import RewardModelModule, load_classifier, pair_scores, save_classifier
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.rewards import ModelReward
from tests.training.runs import resumed

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"accelerator": "cpu", "val_check_interval": 6},
    "model": {"classifier": {"from_scratch": SHAPE}, "max_length": 96, "optimization": {"lr": 0.01}},
    "data": {
        "pairs": {
            "class_path": "grpo_pl.extras.preferences.pairs.BrevityPreferences",
            "init_args": {"count": 200, "val_count": 40},
        },
        "steps": 12,
        "pairs_per_step": 16,
    },
    "checkpoint": {"every_n_rollouts": 6},
}


def _config(folder: Path, name: str = "scorer", **parts: Any) -> Path:
    tree = {key: {**value, **parts.get(key, {})} if isinstance(value, dict) else value for key, value in CONFIG.items()}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def trained(command_line: Any) -> Path:
    """The folder of a run of twelve steps."""
    run = command_line("fit", "--config", _config(command_line.folder))
    assert run.status == 0 and run.out.startswith("agrees with "), run.err
    return Path(command_line.runs / "scorer")


def test_the_export_scores_held_out_pairs_as_the_run_did(trained: Path, read_metrics: Callable[..., Any]) -> None:
    rows = read_metrics(trained / "metrics.csv")
    assert [int(row["step"]) for row in rows if "loss" in row] == list(range(1, 13))
    validated = [row for row in rows if "val/agreement" in row]
    assert [int(float(row["step"])) for row in validated] == [0, 6, 12]
    last = {name: float(value) for name, value in validated[-1].items()}
    assert last["val/agreement"] >= 0.9 > float(validated[0]["val/agreement"])
    assert last["val/agreement_low"] < last["val/agreement"] <= last["val/agreement_high"]
    pairs = BrevityPreferences(count=200, val_count=40).held_out()
    reward = ModelReward(model=str(trained / "export"), max_length=96)
    scores = [
        [score.value for score in reward([getattr(pair, name) for pair in pairs], [""] * 40, {"prompt": prompts})]
        for name in ("chosen", "rejected")
        if (prompts := [pair.prompt for pair in pairs])
    ]
    agreed = sum(better > worse for better, worse in zip(*scores, strict=True))  # type: ignore[operator]
    assert agreed / 40 == pytest.approx(last["val/agreement"])


def test_a_resumed_run_is_the_same_to_the_bit(
    trained: Path, command_line: Any, read_metrics: Callable[..., Any]
) -> None:
    again, _ = resumed(command_line, read_metrics, trained, after=6)
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (trained, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_does_not_go_on_with_other_steps(trained: Path, command_line: Any) -> None:
    checkpoint = trained / "checkpoints" / "rollout-000006.ckpt"
    fit = ("fit", "--config", _config(command_line.folder), "--ckpt_path", checkpoint, "--name=other")
    run = command_line(*fit, "--data.seed=1", "--data.pairs.init_args.seed=1")
    assert run.status == 1 and "data.pairs and data.seed changed since this run began" in run.err, run.err
    assert not (command_line.runs / "other").exists()


def test_steps_that_are_not_finite_end_the_run(command_line: Any, read_metrics: Callable[..., Any]) -> None:
    settings = ("--model.optimization.lr=1e36", "--model.optimization.max_skipped_updates=2", "--name=diverged")
    run = command_line("fit", "--config", _config(command_line.folder), *settings)
    assert run.status == 1 and "2 updates in a row had a loss or gradient that is not finite" in run.err, run.err
    assert len([row for row in read_metrics(command_line.runs / "diverged" / "metrics.csv") if "loss" in row]) < 12


def test_a_classifier_has_the_type_that_its_settings_name(tmp_path: Path) -> None:
    config = PolicyConfig(from_scratch=SHAPE, dtype="bfloat16", attn_implementation="eager")
    model = load_classifier(config, tokenizer := load_tokenizer(config))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    save_classifier(model.config, model.state_dict(), tokenizer, tmp_path / "model", True)
    for dtype, attention in (("float32", "eager"), ("auto", "sdpa")):
        saved = PolicyConfig(path=str(tmp_path / "model"), dtype=dtype, attn_implementation=attention)  # type: ignore[arg-type]
        for weights in (True, False):
            model = load_classifier(saved, tokenizer, weights=weights)
            assert model.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
            assert model.config._attn_implementation == attention


def test_scores_do_not_depend_on_padding() -> None:
    config = PolicyConfig(from_scratch=SHAPE)
    module = RewardModelModule(config, max_length=96)
    model = load_classifier(config, module.tokenizer)
    pairs = BrevityPreferences(count=6, val_count=1).training()
    together = torch.stack(pair_scores(model, module.tokenizer, pairs, max_length=96), dim=1)
    apart = torch.cat(
        [torch.stack(pair_scores(model, module.tokenizer, [pair], max_length=96), dim=1) for pair in pairs]
    )
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)


def _faults(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    def pairs(name: str, *rows: Any) -> dict[str, Any]:
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"class_path": "grpo_pl.extras.preferences.pairs.PreferenceFile", "init_args": {"path": str(file)}}
        return {"data": {"pairs": source}}

    policy = folder / "a_policy_of_two_labels"
    config = PolicyConfig(from_scratch=SHAPE)
    tokenizer = load_tokenizer(config)
    load_model(config, tokenizer).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    (policy / "model.safetensors").unlink()
    good = {"prompt": "1", "chosen": "a", "rejected": "b"}
    return {
        "no rejected": (pairs("lacking", {"prompt": "1", "chosen": "a"}), "there is no rejected"),
        "odd characters": (
            pairs("odd", *({**good, "prompt": f"\N{GREEK SMALL LETTER PI}{i}"} for i in range(50))),
            "lacks",
        ),
        "unequal shares": (
            {"trainer": {"devices": 3, "strategy": "ddp"}},
            "data.pairs_per_step=16 does not divide among 3 processes",
        ),
        "no classifier": ({"model": {"classifier": {"from_scratch": {"model_type": "mamba2"}}}}, "scores texts"),
        "no model": ({"model": {"classifier": {"path": str(policy)}}}, "cannot load the model"),
    }


def test_faults_end_in_one_line_before_a_run_folder_is_made(command_line: Any) -> None:
    for number, (what, (parts, told)) in enumerate(_faults(command_line.folder).items()):
        run = command_line("fit", "--config", _config(command_line.folder, f"fault{number}", **parts))
        assert run.status in (1, 2) and told in run.err and len(run.err.strip().splitlines()) == 1, (what, run.err)
        assert not (command_line.runs / f"fault{number}").exists()
