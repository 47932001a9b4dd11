"""Small random models and a request that every engine must serve alike."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_pl.types import SampleKey, Split

VOCABULARY = 37
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform, so that a wrong forward pass shows in the samples
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _llama() -> PreTrainedModel:
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=scaling))


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=12)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "gpt2": _gpt2,
}


@pytest.fixture(scope="session")
def build_model() -> Callable[..., PreTrainedModel]:
    """``build_model("qwen2", seed=0)``: a random model in training mode whose biases and norms are not trivial."""

    def build(family: str, *, seed: int = 0) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = BUILDERS[family]()
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name or "ln_" in name:
                    parameter.data.add_(torch.randn_like(parameter) * 0.2)
                elif family == "gpt2":
                    parameter.data.mul_(8.0)
        return model.train()

    return build


@pytest.fixture(scope="session")
def make_keys() -> Callable[..., list[list[SampleKey]]]:
    """``make_keys(prompts=3, group_size=4)``: names for (P, G) samples."""

    def make(prompts: int, group_size: int, *, seed: int = 0, split: Split = "train") -> list[list[SampleKey]]:
        return [
            [
                SampleKey(seed=seed, split=split, step=3, attempt=0, prompt_id=100 + p, sample=g)
                for g in range(group_size)
            ]
            for p in range(prompts)
        ]

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Three prompts of different lengths."""
    return [[5, 9, 1, 7, 3, 3, 8], [2], [11, 4, 30, 22]]
