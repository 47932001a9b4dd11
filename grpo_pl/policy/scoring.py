"""Teacher-forced scoring: the log-probabilities that a policy gives to completions it, or another, has drawn."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_pl.functional.logprobs import head_logprobs, token_entropy, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_plain_heads: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


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

    Positions count unmasked tokens, so the result does not depend on the amount of padding. Where logits are nothing
    but the output of a linear head, that head runs on unmasked completion tokens only, in chunks; other models (capped
    or scaled logits, wrapped heads) make their own logits.

    Args:
        prompt_ids, prompt_mask: (B, S), left-padded.
        completion_ids, completion_mask: (B, T), right-padded.
        temperature: divides the logits, as it did while sampling.

    Returns:
        logprobs (B, T) float32, and entropy (B, T) or None. What is masked holds arbitrary finite numbers.
    """
    mask = torch.cat([prompt_mask, completion_mask], dim=1)  # (B, S + T)
    inputs = {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
        "use_cache": False,
        "logits_to_keep": completion_ids.shape[1] + 1,  # the last prompt token predicts the first completion token
    }
    if not _has_plain_head(model):
        logits = model(**inputs).logits[:, :-1]  # (B, T, V)
        entropy = token_entropy(logits, temperature=temperature) if with_entropy else None
        return token_logprobs(logits, completion_ids, temperature=temperature), entropy

    head = model.get_output_embeddings()

    def score(hidden: Tensor) -> Tensor:
        """(N, 1 or 2) in place of logits: log-probability and entropy of the N unmasked completion tokens."""
        predicting = hidden[:, -completion_ids.shape[1] - 1 : -1][completion_mask]  # (N, H)
        logprobs, entropy = head_logprobs(
            predicting,
            head.weight,
            completion_ids[completion_mask],
            bias=head.bias,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return torch.stack([logprobs] if entropy is None else [logprobs, entropy], dim=-1)

    with _forward_replaced(head, score):  # inside the model's forward, where FSDP has gathered the head's weight
        scores = model(**inputs).logits
    logprobs, *entropies = (_scatter(column, completion_mask) for column in scores.unbind(dim=-1))
    return logprobs, entropies[0] if with_entropy else None


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are the output of a plain linear head, bit for bit; asked once per model."""
    if model not in _plain_heads:
        _plain_heads[model] = _try_head(model)
    return _plain_heads[model]


def _try_head(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head) or head._forward_hooks:
        return False
    outputs: list[Tensor] = []
    watch = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[0, 1, 2]], device=model.device), use_cache=False).logits
    finally:
        watch.remove()
    return len(outputs) == 1 and torch.equal(outputs[0], logits)


@contextmanager
def _forward_replaced(module: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own shows again


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with ``values`` (N,) where ``mask``, in order, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
