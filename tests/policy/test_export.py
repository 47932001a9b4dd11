"""An exported policy: loadable, complete, and never half there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward, FormatReward, MathReward
from grpo_pl.types import SamplingParams

TEMPLATE = PromptTemplate(system="Think.", prefill="<think>")
SAMPLING = SamplingParams(max_completion_length=20, temperature=0.7)


@pytest.fixture
def export(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[..., None]:
    """``export(folder, environment=…)``"""
    told = TrainedWith(template=TEMPLATE, rewards=[ExactReward(correctness=True).spec()], sampling=SAMPLING)
    return lambda folder, **more: export_policy(folder, replace(told, **more), model=tiny_policy, tokenizer=tokenizer)


def test_the_folder_loads_with_the_same_logits_and_generation_settings(
    export: Any, tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "export")("3+4=").input_ids])
    assert ids.tolist() == [tokenizer("3+4=").input_ids]
    assert torch.equal(loaded(ids).logits, tiny_policy.eval()(ids).logits)
    settings = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (settings.do_sample, settings.temperature, settings.max_new_tokens) == (True, 0.7, 20)
    assert settings.pad_token_id == tokenizer.pad_token_id
    assert settings.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])


def test_weights_are_safetensors_alone(export: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    export(tmp_path / "export")
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "grpo_pl.json"} <= names
    assert not {name for name in names if name.endswith((".bin", ".pt", ".pkl", ".ckpt"))}


def test_an_older_export_is_replaced_as_a_whole(export: Any, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "grpo_pl.json").touch()
    (tmp_path / "export" / "leftover").touch()
    export(tmp_path / "export")
    assert not (tmp_path / "export" / "leftover").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_that_fails_leaves_the_older_one(export: Any, tmp_path: Path) -> None:
    export(tmp_path / "export")
    with pytest.raises(TypeError, match="not JSON serializable"):
        export(tmp_path / "export", rewards=[{"class_path": "my.Reward", "init_args": {"model": object()}}])
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "grpo_pl.json").exists()


def test_the_manifest_holds_plain_values_that_rebuild_template_and_rewards() -> None:
    rewards = [MathReward(percent="unit", workers=1), FormatReward(weight=0.25, partial=True)]
    specs = [reward.spec() for reward in rewards]
    told = json.loads(json.dumps(TrainedWith(template=TEMPLATE, rewards=specs, sampling=SAMPLING).manifest()))
    assert PromptTemplate(**told["template"]) == TEMPLATE
    assert told["max_completion_length"] == 20
    built = []
    for reward in told["rewards"]:
        module, _, name = reward["class_path"].rpartition(".")
        built.append(getattr(__import__(module, fromlist=[name]), name)(**reward["init_args"]))
    assert built == rewards


def test_a_folder_that_is_no_export_is_never_replaced(export: Any, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ValueError, match="is no earlier export"):
        export(tmp_path)
    assert (tmp_path / "precious").exists()


def test_settings_of_an_environment_that_may_hold_a_secret_are_not_published(export: Any, tmp_path: Path) -> None:
    client = {"base_url": "http://judge", "headers": {"Authorization": "Bearer secret"}}
    settings = {"env": {"judge": {"client": client}}, "variables": {"KEY": "secret"}}
    export(tmp_path / "export", environment={"class_path": "my_package.MyAgents", "init_args": settings})
    text = (tmp_path / "export" / "grpo_pl.json").read_text()
    assert "secret" not in text and json.loads(text)["environment"]["init_args"] == {
        "env": {"judge": {"client": {"base_url": "http://judge"}}}
    }
