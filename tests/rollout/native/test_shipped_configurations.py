"""No shipped configuration draws by transformers' ``generate``: neither as it stands nor with adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_pl.extras.plan.workload import resolved_settings
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.rollout.native.weights import refuse_llama_family
from tests.conftest import TINY_POLICY

CONFIGS = Path(__file__).parents[3] / "configs"
FAMILIES = {"Qwen/Qwen2.5": "qwen2", "HuggingFaceTB/SmolLM2": "llama"}
"""Architectures of what configurations name on the hub."""
NO_POLICY = {"reward_model", "smollm2_box", "smollm2_lora"}
"""A classifier, and overlays."""
SHIPPED = [file.stem for file in sorted(CONFIGS.glob("*.yaml")) if file.stem not in {*NO_POLICY, "sft"}]
LORA = str(CONFIGS / "smollm2_lora.yaml")
SETTINGS: dict[str, list[str]] = {
    "as it stands": [],
    "with adapters": [LORA],
    "with adapters of weights in bfloat16": [LORA, "--model.policy.dtype=bfloat16"],
}


def _policy(settings: Any) -> PreTrainedModel:
    """A small model of the policy's architecture."""
    sizes: dict[str, Any] = dict(settings.from_scratch or {})
    if settings.path is not None and not (CONFIGS.parent / settings.path).exists():
        family = next((kind for name, kind in FAMILIES.items() if str(settings.path).startswith(name)), None)
        sizes = {**TINY_POLICY, "model_type": family, "max_position_embeddings": 4096}
    if settings.images:
        lora = settings.lora and Lora(rank=settings.lora.rank, alpha=settings.lora.alpha)
        policy = PolicyConfig(from_scratch=sizes, images=True, lora=lora, dtype=settings.dtype)
        return load_model(policy, load_tokenizer(policy))
    config = AutoConfig.for_model(**sizes, vocab_size=128)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    if settings.lora is not None:
        targets = settings.lora.targets
        add_adapters(model, Lora(rank=settings.lora.rank, alpha=settings.lora.alpha, targets=targets), seed=0)
    return model


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("name", SHIPPED)
def test_it_draws_by_the_own_forward_pass(name: str, how: str) -> None:
    parts = resolved_settings([str(CONFIGS / f"{name}.yaml"), *SETTINGS[how]])
    model, sampling = _policy(parts.model.policy), parts.model.sampling
    mixed = parts.trainer.precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        assert refuse_llama_family(model, length=sampling.max_completion_length) is None
