"""Kernels in C to test, and small models with biases and norms of every kind for them."""

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.extras.kernels.library import training_kernels
from grpo_pl.types import SampleKey
from tests.rollout.drawn import make_keys

LIBRARY = os.environ.get("DECODE_LIBRARY")  # by the test with sanitizers
KERNELS = built_kernels(Path(LIBRARY) if LIBRARY else None)
in_c = pytest.mark.skipif(training_kernels() is None, reason="no C compiler has built the kernels")
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def small_model(
    *, seed=0, qwen3=False, heads=4, key_heads=2, head_size=16, vocabulary=64, intermediate=96, layers=2
) -> PreTrainedModel:
    kind, config = (Qwen3ForCausalLM, Qwen3Config) if qwen3 else (LlamaForCausalLM, LlamaConfig)
    shape = {"hidden_size": 2 * heads * 4, "intermediate_size": intermediate, "vocab_size": vocabulary}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_size}
    shape |= {"num_hidden_layers": layers, "max_position_embeddings": 512, "initializer_range": 0.2}
    biases = {"attention_bias": True} if qwen3 else {"attention_bias": True, "mlp_bias": True}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config(**shape, **biases, bos_token_id=None, eos_token_id=None, pad_token_id=None))
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def named_keys(prompts: int, group: int, seed: int = 7) -> list[list[SampleKey]]:
    return make_keys(prompts, group, seed=seed, step=0, prompt_id=0)
