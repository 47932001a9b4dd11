"""Weights in memory: a model takes all of them or none."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from grpo_pl.extras.engines.native_child import NativeWorker
from grpo_pl.policy.weights import checkpoint_weights, from_weights, lacking, load_whole

NORM = "model.norm.weight"


@pytest.fixture
def weights(tiny_policy: PreTrainedModel) -> dict[str, Tensor]:
    """Twice those of the policy, whose head is tied to its embedding."""
    return {name: 2 * weight.clone() for name, weight in tiny_policy.state_dict().items()}


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_of_tied_weights_one_name_is_enough(
    tiny_policy: PreTrainedModel, weights: dict[str, Tensor], stored: str
) -> None:
    (other,) = {"model.embed_tokens.weight", "lm_head.weight"} - {stored}
    expected = weights.pop(other)
    load_whole(tiny_policy, weights)
    assert torch.equal(tiny_policy.state_dict()[other], expected)
    del weights[stored]
    assert sorted(lacking(tiny_policy, weights)) == ["lm_head.weight", "model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({NORM: None}, f"{NORM} is missing"),
        ({NORM: torch.zeros(3)}, rf"{NORM} is \[3\] and should be \[32\]"),
        ({NORM: "x"}, rf"{NORM} is str and should be \[32\]"),
        ({"more": torch.zeros(3)}, "more is not part of the model"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    tiny_policy: PreTrainedModel, weights: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    before = {name: weight.clone() for name, weight in tiny_policy.state_dict().items()}
    changed = {name: weight for name, weight in (weights | changes).items() if weight is not None}
    with pytest.raises(ValueError, match=reason):
        load_whole(tiny_policy, changed)
    assert all(torch.equal(weight, before[name]) for name, weight in tiny_policy.state_dict().items())


def test_an_untied_head_must_be_there(tiny_policy: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Its class may tie it; this model's config does not."""
    config = type(tiny_policy.config)(**{**tiny_policy.config.to_dict(), "tie_word_embeddings": False})
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        load_whole(type(tiny_policy)(config), weights)


def test_experts_are_fused_from_whole_weights_only() -> None:
    config = MixtralConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    weights = dict(checkpoint_weights(model))
    again = from_weights(MixtralForCausalLM, weights, config=config, dtype=torch.float32)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in again.state_dict().items())
    del weights[NORM]
    with pytest.raises(ValueError, match=f"MixtralForCausalLM: {NORM} is missing"):
        from_weights(MixtralForCausalLM, weights, config=config, dtype=torch.float32)


def test_an_engine_takes_no_part_of_a_policy(tiny_policy: PreTrainedModel) -> None:
    worker = NativeWorker(config=tiny_policy.config.to_dict(), dtype="float32", device="cpu", max_batch_rows=0)
    weights = dict(checkpoint_weights(tiny_policy))
    worker.load(iter(weights.items()))
    assert torch.equal(worker.model.state_dict()[NORM], tiny_policy.state_dict()[NORM])
    with pytest.raises(ValueError, match="more is not part of the model"):
        worker.load(iter({**weights, "more": torch.zeros(1)}.items()))
    del weights[NORM]
    with pytest.raises(ValueError, match=f"{NORM} is missing"):
        worker.load(iter(weights.items()))
