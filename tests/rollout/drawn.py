"""Small random models, keys and prompts for any engine, and whether two engines have drawn the same."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
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

from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.types import GenerateRequest, Rollout, SampleKey, SamplingParams, StopStrings

SHAPE = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform, so that a wrong forward pass shows in the samples
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32}
GPT2 = {"vocab_size": 37, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        SHAPE | {"attention_bias": True, "mlp_bias": True, "rope_parameters": SCALED},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, SHAPE | {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, SHAPE | {"head_dim": 12}),
    "mistral": (MistralForCausalLM, MistralConfig, SHAPE | {"sliding_window": None}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2 | dict.fromkeys(("bos_token_id", "eos_token_id"))),
}
UNEVEN = [[5, 9, 1, 7, 3, 3, 8], [2], [11, 4, 30, 22]]
"""Three prompts of different lengths."""
PROMPTS = [[3, 4, 5], [8, 9]]


def build_model(family: str, *, seed: int = 0) -> PreTrainedModel:
    """A random model in training mode whose biases and norms are not trivial."""
    kind, config, shape = MODELS[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config(**shape))
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
            elif family == "gpt2":
                parameter.data.mul_(8.0)
    return model.train()


def make_keys(prompts: int, group: int, **changes: Any) -> list[list[SampleKey]]:
    """Names of (P, G) samples, of prompts with ascending numbers."""
    fields = {"seed": 0, "split": "train", "step": 3, "attempt": 0, "prompt_id": 100, "sample": 0, **changes}
    first = SampleKey(**fields)
    return [[replace(first, prompt_id=first.prompt_id + p, sample=g) for g in range(group)] for p in range(prompts)]


def generate(
    engine: RolloutEngine,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[Sequence[SampleKey]],
    *,
    length: int = 14,
    eos: Sequence[int] = (6, 20),
    pad: int = 0,
    limits: Sequence[Sequence[int]] | None = None,
    stops: StopStrings | None = None,
    progress: Any = None,
    should_stop: Any = None,
    **sampling: Any,
) -> Rollout:
    """A rollout by any engine."""
    request = GenerateRequest(
        prompt_ids=prompts,
        keys=keys,
        sampling=SamplingParams(max_completion_length=length, **sampling),
        eos_token_ids=eos,
        pad_token_id=pad,
        limits=limits,
        stops=stops,
    )
    return engine.generate(model, request, progress=progress, should_stop=should_stop)


def drawn(engine: RolloutEngine, model: PreTrainedModel, **how: Any) -> Rollout:
    """Four completions of each of ``PROMPTS``; of up to eight tokens, at temperature 0.8, unless told otherwise."""
    keys = make_keys(len(PROMPTS), 4, seed=1, step=0, prompt_id=0)
    return generate(engine, model, PROMPTS, keys, **{"length": 8, "eos": [5, 6, 7], "temperature": 0.8, **how})


def assert_same(ours: Rollout, reference: Rollout, *, atol: float = 1e-4, but: Collection[str] = ()) -> None:
    """All that a rollout holds ``but`` some of it, log-probabilities up to ``atol``."""
    for name, theirs in vars(reference).items():
        own = getattr(ours, name)
        if name in but:
            continue
        if isinstance(theirs, Tensor) and theirs.is_floating_point():
            torch.testing.assert_close(own, theirs, atol=atol, rtol=0.0)
        else:
            assert torch.equal(own, theirs) if isinstance(theirs, Tensor) else own == theirs, name


@torch.no_grad()
def scored(model: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    """(B, T) log-probabilities of a rollout's tokens by teacher forcing."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    rows: dict[str, Any] = {name: getattr(rollout, name) for name in names}
    return completion_logprobs(model.eval(), **rows, temperature=temperature)[0]


def rows_of(rollout: Rollout) -> list[list[int]]:
    """The tokens of each completion."""
    return [row[:n] for row, n in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)]
