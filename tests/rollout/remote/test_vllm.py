"""vLLM on a server draws the samples of the native engine, from the weights that were pushed over HTTP."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see docs/engines.md"),
]
OVERLAY = Path(__file__).parents[3] / "configs/engine/vllm.yaml"


def _draw(engine: Any, model: Any, make_keys: Any, **how: Any) -> Rollout:
    return engine.generate(
        model,
        GenerateRequest(
            prompt_ids=[[(7 * p + 3 * t) % 99 + 1 for t in range(9 - p % 4)] for p in range(8)],
            keys=make_keys(8, 8),
            sampling=SamplingParams(max_completion_length=64, **how),
            eos_token_ids=[],
            pad_token_id=0,
        ),
    )


def test_vllm_on_a_server_draws_the_samples_of_the_native_engine(serve: Any, connect: Any, make_keys: Any) -> None:
    server = serve(f"--config={OVERLAY}", "--model.engine.init_args.kv_cache_gib=0.0625", in_fork=False)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=100,
            num_hidden_layers=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            tie_word_embeddings=True,
            **shape,
            **ends,
        )
    )
    engine = connect(server.url)
    for temperature in (0.7, 1.0, 1.3):
        ours, here = (_draw(one, model, make_keys, temperature=temperature) for one in (engine, NativeEngine()))
        assert ours.completion_ids.shape == (64, 64)
        assert torch.equal(ours.completion_ids, here.completion_ids)
        torch.testing.assert_close(ours.sampling_logprobs, here.sampling_logprobs, atol=1e-4, rtol=0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.update_weights(model)
        engine.updates += 1
    assert engine.pushes == 3 and engine.weights_version == 2
