"""Requests to engines: prompts and keys with the ends that model, tokenizer and sampling parameters name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_pl.policy.loading import end_token_ids
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate_request(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_ids: Sequence[Sequence[int]],
    keys: Sequence[Sequence[SampleKey]],
    sampling: SamplingParams,
    prefix: str,
) -> GenerateRequest:
    """What an engine is asked for a policy.

    Args:
        prefix: text before the completions in which a stop string may begin.

    Raises:
        ValueError: as `GenerateRequest` and ``StopStrings.of``.
    """
    return GenerateRequest(
        prompt_ids=prompt_ids,
        keys=keys,
        sampling=sampling,
        eos_token_ids=end_token_ids(model, tokenizer, sampling),
        pad_token_id=int(tokenizer.pad_token_id),
        stops=StopStrings.of(sampling, tokenizer, prefix),
    )
