"""Weights in 4 bits under adapters: with bitsandbytes where it is installed, and one line where it is not."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.kernels.fused_modules import fused_forwards, patched
from grpo_pl.extras.plan.memory import Shape, memory_plan
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.lora import Lora, merged
from grpo_pl.policy.quantization import is_quantized, nf4_config, plain
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import find_model
from grpo_pl.policy.weights import checkpoint_weights
from grpo_pl.rewards import ExactReward
from grpo_pl.types import SamplingParams
from tests.extras.plan.test_command import WORK

installed = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
SCRATCH = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A folder with a model in full precision."""
    folder = tmp_path_factory.mktemp("base") / "export"
    rewards = [ExactReward(correctness=True).spec()]
    trained = TrainedWith(template=PromptTemplate(), rewards=rewards, sampling=SamplingParams())
    export_policy(folder, trained, model=load_model(PolicyConfig(from_scratch=SCRATCH), tokenizer), tokenizer=tokenizer)
    return folder


def _policy(base: Path) -> PolicyConfig:
    return PolicyConfig(path=str(base), lora=Lora(rank=4, alpha=8.0), quantization="nf4")


@pytest.fixture
def quantized(base: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """With adapters that do something."""
    return _moved(load_model(_policy(base), tokenizer))


def _moved(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return model


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_bitsandbytes_it_is_one_line(base: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"^policy.quantization nf4 needs bitsandbytes: pip install"):
        load_model(_policy(base), tokenizer)


def test_what_cannot_be_meant_is_refused() -> None:
    for changes in ({"lora": None}, {"path": None, "from_scratch": SCRATCH}):
        with pytest.raises(ValueError, match=r"set policy.path and policy.lora, or policy.quantization null"):
            replace(_policy(Path("x")), **changes)


def test_the_plan_counts_four_bits_and_a_little_for_the_blocks() -> None:
    shape = Shape(
        parameters=1000, trainable=10, block_parameters=400, layers=2, hidden=8, intermediate=8, query=8, key=8,
        vocabulary=25,
    )  # fmt: skip
    plan = memory_plan(shape, replace(WORK, quantized=True, weight_bytes=2, layout="single", offload=False))
    assert plan.kept["parameters"] == pytest.approx(200 * 2 + 800 * 4.127 / 8)
    assert plan.rollout["weights for decoding"] == 200 * WORK.compute_bytes


@installed
def test_the_settings_are_those_of_qlora() -> None:
    told = nf4_config(torch.bfloat16).to_dict()
    assert (told["load_in_4bit"], told["bnb_4bit_quant_type"], told["bnb_4bit_use_double_quant"]) == (True, "nf4", True)
    assert told["bnb_4bit_compute_dtype"] == "bfloat16"


@installed
def test_the_linear_layers_of_the_blocks_are_packed_and_only_adapters_train(quantized: PreTrainedModel) -> None:
    packed = {name for name, weight in quantized.named_parameters() if is_quantized(weight)}
    assert len(packed) == 7 * SCRATCH["num_hidden_layers"]
    assert all(name.endswith("base_layer.weight") for name in packed)
    trained = {name for name, weight in quantized.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * len(packed) and all(".lora_" in name for name in trained)
    _logits(quantized.eval())  # as a rollout does
    quantized.train()(IDS).logits.sum().backward()
    assert {name for name, weight in quantized.named_parameters() if weight.grad is not None} == trained


@installed
def test_adapters_beside_packed_weights_learn_in_few_bits_as_before(quantized: PreTrainedModel) -> None:
    """Up to rounding: by bitsandbytes' own layers in float32, and here under autocast."""
    trained = [weight for weight in quantized.parameters() if weight.requires_grad]

    def learned() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = quantized(IDS).logits
        return logits, list(torch.autograd.grad(logits.float().log_softmax(-1)[..., 0].sum(), trained))

    logits, gradients = learned()
    with torch.autocast("cpu", torch.bfloat16):
        forwards = fused_forwards(quantized)
        assert len(forwards) == 14
        with patched(forwards):
            found, theirs = learned()
    torch.testing.assert_close(found.float(), logits, atol=0.1, rtol=0.0)
    for ours, gradient in zip(theirs, gradients, strict=True):
        assert (ours - gradient).norm() < 0.05 * gradient.norm()


@installed
def test_the_packed_weights_are_near_those_of_the_folder(quantized: PreTrainedModel, base: Path) -> None:
    whole = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    for name, weight in quantized.named_parameters():
        if is_quantized(weight):
            before = whole[name.replace(".base_layer", "")]
            error = (plain(weight) - before).abs()
            assert 0 < error.max() < 0.2 * before.abs().max()  # 16 levels between the extremes of a block


@installed
def test_merged_and_pushed_weights_compute_what_the_adapted_model_does(quantized: PreTrainedModel) -> None:
    want = _logits(quantized)
    copy = merged(quantized)
    assert not hasattr(copy.config, "quantization_config")
    torch.testing.assert_close(_logits(copy), want, rtol=1e-4, atol=1e-4)
    whole = copy.state_dict()
    for name, weight in checkpoint_weights(quantized):
        torch.testing.assert_close(weight, whole[name])


@installed
def test_a_checkpoint_holds_no_packed_weight_and_brings_the_adapters(
    quantized: PreTrainedModel, base: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = quantized.state_dict()
    assert not any("base_layer.weight" in name for name in state)
    other = load_model(_policy(base), tokenizer)
    assert not torch.equal(_logits(other), _logits(quantized))
    other.load_state_dict(state)
    torch.testing.assert_close(_logits(other), _logits(quantized), rtol=0, atol=0)


@installed
def test_a_run_learns_goes_on_and_is_served(command_line: Any, base: Path) -> None:
    policy = {"path": str(base), "lora": {"rank": 4}, "quantization": "nf4"}
    config = command_line.config("packed", model__policy=policy, model__cold_start=None, data__steps=2)
    command_line.done("fit", "--config", config)
    run = command_line.runs / "packed"
    command_line.done("fit", "--config", config, "--resume", "--data.steps=3")
    trained = find_model(run / "checkpoints" / "rollout-000003.ckpt").load_policy("cpu")
    assert any(is_quantized(weight) for weight in trained.parameters())
    exported = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    torch.testing.assert_close(_logits(exported), _logits(trained), rtol=1e-4, atol=1e-4)


@installed
def test_a_cold_start_and_frozen_weights_contradict_each_other(command_line: Any, base: Path) -> None:
    policy = {"path": str(base), "lora": {"rank": 4}, "quantization": "nf4"}
    outcome = command_line("fit", "--config", command_line.config("both", model__policy=policy))
    assert outcome.status != 0
    assert "cold_start writes whole weights" in outcome.err
