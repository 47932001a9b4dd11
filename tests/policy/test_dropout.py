"""Training mode computes what evaluation mode does, whatever a model calls its dropout, or it is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.policy.dropout import switch_noise_off
from grpo_pl.policy.loading import PolicyConfig, load_model

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {**SMALL, "intermediate_size": 24, "num_key_value_heads": 2}
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
RATES: dict[str, dict[str, Any]] = {
    "opt": {**SMALL, "word_embed_proj_dim": 16, "ffn_dim": 24, "dropout": 0.1, "layerdrop": 0.3},
    "seed_oss": {**SIZES, "residual_dropout": 0.1, "attention_dropout": 0.1},
    "biogpt": {**SMALL, "intermediate_size": 24, "hidden_dropout_prob": 0.1, "activation_dropout": 0.1},
    "xglm": {
        "d_model": 16,
        "num_layers": 2,
        "attention_heads": 2,
        "ffn_dim": 24,
        "activation_dropout": 0.1,
        "layerdrop": 0.3,
    },
    "falcon": {**SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1},  # rates are read in its config
    "gpt_bigcode": {"n_embd": 16, "n_head": 2, "n_layer": 2},
    "mixtral": EXPERTS,
}
IDS = torch.arange(3, 15).unsqueeze(0)


class Gumbel(nn.Module):
    """Noise in training mode, with a size of its own and a number that evaluation needs."""

    def __init__(self, inner: nn.Module, **sizes: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, 2.0
        for name, size in sizes.items():
            setattr(self, name, size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(hidden) * getattr(self, "heat", 1.0) if self.training else 0.0
        return self.inner(hidden + noise) * self.scale


def _policy(family: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return load_model(PolicyConfig(from_scratch={"model_type": family, **RATES[family]}), tokenizer)


@torch.no_grad()
def _logits(model: PreTrainedModel, *, training: bool, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    logits: torch.Tensor = model.train(training)(IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", RATES)
def test_no_rate_is_left_whatever_its_name(tokenizer: PreTrainedTokenizerBase, family: str) -> None:
    model = _policy(family, tokenizer)
    evaluated = _logits(model, training=False)
    switch_noise_off(model.train())
    assert model.training
    assert all(torch.equal(_logits(model, training=True, seed=seed), evaluated) for seed in range(6))
    assert torch.equal(_logits(model, training=False), evaluated)


def test_noise_of_a_size_is_ended_and_other_numbers_stay(tiny_policy: PreTrainedModel) -> None:
    noisy = Gumbel(tiny_policy.model.layers[0].mlp.up_proj, heat=1e-3, unused=0.5)
    tiny_policy.model.layers[0].mlp.up_proj = noisy
    switch_noise_off(tiny_policy)
    assert (noisy.heat, noisy.scale, noisy.unused) == (0.0, 2.0, 0.5)
    assert tiny_policy.config.initializer_range == 0.3 and tiny_policy.config.rms_norm_eps == 1e-6


class Scaled(nn.Module):
    """Numbers that a rate of 0 or of nearly 1 cannot stand for: a divisor, and one that refuses other values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.divisor, self.checked = inner, 2.0, 0.5

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "checked" and value != 0.5:
            raise TypeError(f"{name} must be 0.5, got {value}")
        super().__setattr__(name, value)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * (1 / self.divisor)


def test_a_number_that_cannot_be_tried_stays_and_the_next_are_tried(tiny_policy: PreTrainedModel) -> None:
    mlp = tiny_policy.model.layers[0].mlp
    mlp.gate_proj = scaled = Scaled(mlp.gate_proj)
    mlp.up_proj = noisy = Gumbel(mlp.up_proj, heat=0.5)
    switch_noise_off(tiny_policy.eval())
    assert (scaled.divisor, scaled.checked, noisy.heat) == (2.0, 0.5, 0.0)
    assert not tiny_policy.training
    mlp.down_proj = Gumbel(mlp.down_proj)
    with pytest.raises(ValueError, match="down_proj"):
        switch_noise_off(tiny_policy)
    assert (scaled.divisor, scaled.checked) == (2.0, 0.5) and not tiny_policy.training


def test_noise_without_a_rate_is_refused_by_module_and_class(tiny_policy: PreTrainedModel) -> None:
    tiny_policy.model.layers[0].mlp.up_proj = Gumbel(tiny_policy.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj \(Gumbel\) of Qwen2ForCausalLM"):
        switch_noise_off(tiny_policy)


def test_a_router_that_samples_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    scratch = {"model_type": "phimoe", **EXPERTS}
    with pytest.raises(ValueError, match=r"mlp\.router \(PhimoeTopKRouter\)"):
        switch_noise_off(load_model(PolicyConfig(from_scratch=scratch), tokenizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_without_noise_is_left_alone_and_so_are_random_numbers(
    tiny_policy: PreTrainedModel, dtype: torch.dtype
) -> None:
    model = tiny_policy.to(dtype)
    before, config = {name: t.clone() for name, t in model.state_dict().items()}, model.config.to_dict()
    floats = [{n: v for n, v in vars(m).items() if isinstance(v, float)} for m in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    switch_noise_off(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.config.to_dict() == config
    assert floats == [{n: v for n, v in vars(m).items() if isinstance(v, float)} for m in model.modules()]


def test_a_broken_model_is_left_to_others(tiny_policy: PreTrainedModel) -> None:
    tiny_policy.model.norm.weight.data.fill_(float("nan"))
    switch_noise_off(tiny_policy)


def test_on_other_devices_nothing_is_tried_and_that_is_said(tiny_policy: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="meta"):
        switch_noise_off(tiny_policy.to("meta"))
