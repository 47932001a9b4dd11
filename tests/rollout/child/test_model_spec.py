"""A specification is that of the model inside, from which a worker makes the same one."""

import pytest
import torch

from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.rollout.child.model_spec import ModelSpec
from tests.rollout.drawn import build_model


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "Qwen2ForCausalLM"), ("gpt2", "GPT2LMHeadModel")])
def test_a_specification_names_type_and_architecture(family: str, architecture: str) -> None:
    spec = ModelSpec.of(build_model(family).bfloat16())
    assert spec.dtype == torch.bfloat16
    assert spec.config.architectures == [architecture]


def test_the_architecture_is_that_of_the_model_inside() -> None:
    model = build_model("llama")
    plain = ModelSpec.of(model).config.to_dict()
    add_adapters(model, Lora(rank=4), seed=0)
    assert ModelSpec.of(model).config.to_dict() == plain
    assert plain["architectures"] == ["LlamaForCausalLM"]
    assert model.config.architectures is None  # the policy's own config stays as it is
