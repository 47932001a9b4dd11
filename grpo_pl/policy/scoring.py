"""Teacher-forced scoring: the log-probabilities that a policy gives to completions it, or another, has drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.functional.logprobs import token_entropy, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def completion_logprobs(
    model: PreTrainedModel,
    *,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (and entropy) of every completion token under ``model``, differentiable.

    Positions count unmasked tokens, so the result does not depend on the amount of padding.

    Args:
        prompt_ids, prompt_mask: (B, S), left-padded.
        completion_ids, completion_mask: (B, T), right-padded.
        temperature: divides the logits, as it did while sampling.

    Returns:
        logprobs (B, T) float32, and entropy (B, T) or None. What is masked holds arbitrary finite numbers.
    """
    mask = torch.cat([prompt_mask, completion_mask], dim=1)  # (B, S + T)
    width = completion_ids.shape[1]
    logits = model(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        attention_mask=mask.long(),
        position_ids=(mask.long().cumsum(dim=1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=width + 1,  # the last prompt token predicts the first completion token
    ).logits[:, :-1]  # (B, T, V)
    entropy = token_entropy(logits, temperature=temperature) if with_entropy else None
    return token_logprobs(logits, completion_ids, temperature=temperature), entropy
