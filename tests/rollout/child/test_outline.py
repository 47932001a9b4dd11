"""An outline goes to another host as plain values, and what comes back starts the same worker."""

import json
from typing import Any

import pytest
import torch

from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.policy.plain_config import check_plain_config
from grpo_pl.rollout.child.outline import Outline, check_size

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "kind", ["falcon_h1", "doge", "gpt2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "mamba2"]
)
def test_configs_of_the_library_are_taken(kind: str) -> None:
    """Some hold infinities, many experts, or configs inside."""
    from transformers import AutoConfig

    check_plain_config(json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False)))


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_plain_values_make_the_same_outline(build_model: Any, family: str) -> None:
    outline = Outline.of(build_model(family).bfloat16())
    again = Outline.from_json(json.loads(json.dumps(outline.to_json())), CPU)
    assert again.dtype == torch.bfloat16
    assert again.config.to_dict() == outline.config.to_dict()


def test_the_architecture_is_that_of_the_model_inside(build_model: Any) -> None:
    model = build_model("llama")
    plain = Outline.of(model).to_json()
    add_adapters(model, Lora(rank=4), seed=0)
    assert Outline.of(model).to_json() == plain
    assert plain["config"]["architectures"] == ["LlamaForCausalLM"]
    assert model.config.architectures is None  # the policy's own config stays as it is


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "a policy is a config with its model_type"),
        ({"config": {"model_type": "qwen2"}, "dtype": "int8"}, "a dtype of float32, bfloat16, float16"),
        ({"config": {"model_type": "no_such"}, "dtype": "float32"}, "no policy of type 'no_such'"),
        ({"config": {"hidden_size": 3}, "dtype": "float32"}, "no policy of type None"),
        ({"config": {"model_type": "qwen2", "hidden_size": "x"}, "dtype": "float32"}, "no policy of type 'qwen2'"),
        ({"config": {"model_type": "qwen2"}, "dtype": ["float32"]}, "a dtype of float32"),
        *(
            ({"config": {"model_type": "qwen2", **config}, "dtype": "float32"}, message)
            for config, message in (
                ({"auto_map": {"AutoConfig": "evil--code.Config"}}, "must not hold 'auto_map'"),
                ({"text_config": {"auto_map": {"AutoConfig": "code.Config"}}}, "must not hold 'auto_map'"),
                ({"layers": [{"quantization_config": {"quant_method": "x"}}]}, "must not hold 'quantization_config'"),
                ({"speculators_config": {"verifier": "evil/model"}}, "must not hold 'speculators_config'"),
                ({"kernel_config": {"a": "b"}}, "must not hold 'kernel_config'"),
                ({"custom_pipelines": {"a": "b"}}, "must not hold 'custom_pipelines'"),
                ({"attn_implementation": "evil/kernel"}, "the kernel 'evil/kernel' in attn_implementation"),
                ({"_attn_implementation": {"": "evil/kernel"}}, "the kernel 'evil/kernel'"),
                ({"_attn_implementation_internal": "evil/kernel"}, "the kernel 'evil/kernel'"),
                ({"_experts_implementation": "evil/kernel"}, "the kernel 'evil/kernel'"),
                ({"to_dict": 1}, "must not hold 'to_dict', which is a method"),
                ({"__class__": 1}, "must not hold '__class__'"),
                ({"num_labels": 2_000_000}, "num_labels is 2000000, which no model has"),
                ({"id2label": {str(n): "a" for n in range(1000)}}, "id2label is 1000"),
                ({"num_hidden_layers": 2_000_000}, "num_hidden_layers is 2000000"),
                ({"text_config": {"num_layers": 1e9}}, "num_layers is 1000000000"),
                ({"__dict__": {}}, "must not hold '__dict__'"),
                ({"num_local_experts": 10**30}, "num_local_experts is 1000"),
            )
        ),
    ],
    ids=str,
)
def test_what_is_no_policy_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outline.from_json(value, CPU)


def test_a_policy_of_more_weights_than_allowed_is_refused_before_it_is_made(build_model: Any) -> None:
    model = build_model("qwen2")
    config = Outline.of(model).config.to_dict()
    size = sum(weight.numel() for weight in model.parameters())
    check_size(config, "float32", 4 * size)
    check_size(config, "bfloat16", 2 * size)
    with pytest.raises(ValueError, match=r"the policy's weights take .* this server takes"):
        check_size(config, "float32", 4 * size - 1)
    with pytest.raises(ValueError, match="weights take 7450"):
        check_size({**config, "vocab_size": 10**9, "hidden_size": 2000}, "float32", 2**30)
    with pytest.raises(ValueError, match="names no architecture"):
        check_size({**config, "architectures": ["Tensor"]}, "float32", 2**30)
