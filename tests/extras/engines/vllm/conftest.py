"""Policies with heads that vLLM has kernels for on a CPU, and the engines that are asked for them."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_pl.extras.engines.vllm import VLLMEngine

MARKS = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see docs/engines.md"),
]
SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 32},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="session")
def build_policy() -> Callable[..., PreTrainedModel]:
    """``build_policy("qwen2", hidden_size=128, …)``"""

    def build(family: str, **changes: Any) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes})
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()

    return build


@pytest.fixture(scope="module")
def make_vllm() -> Iterator[Callable[..., VLLMEngine]]:
    """``make_vllm(max_batch_rows=4, …)``; all are closed at the end."""
    made = []

    def make(**fields: Any) -> VLLMEngine:
        made.append(VLLMEngine(**{"kv_cache_gib": 1 / 16, **fields}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
