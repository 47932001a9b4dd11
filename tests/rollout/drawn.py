"""A small rollout of two prompts by any engine, for what engines record beside the tokens."""

from typing import Any

from transformers import PreTrainedModel

from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.types import GenerateRequest, Rollout, SampleKey, SamplingParams

PROMPTS = [[3, 4, 5], [8, 9]]


def drawn(engine: RolloutEngine, model: PreTrainedModel, **sampling: Any) -> Rollout:
    """Four completions of each of ``PROMPTS``; of up to eight tokens, at temperature 0.8, unless told otherwise."""
    keys = [
        [SampleKey(seed=1, split="train", step=0, attempt=0, prompt_id=p, sample=i) for i in range(4)]
        for p in range(len(PROMPTS))
    ]
    return engine.generate(
        model,
        GenerateRequest(
            prompt_ids=PROMPTS,
            keys=keys,
            sampling=SamplingParams(**{"max_completion_length": 8, "temperature": 0.8, **sampling}),
            eos_token_ids=[5, 6, 7],
            pad_token_id=0,
        ),
    )
