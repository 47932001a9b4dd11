"""Log-probabilities of given tokens, and the entropy of the distributions they were drawn from."""

from __future__ import annotations

from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[token], in float32 whatever the type of ``logits``.

    Args:
        logits: (B, T, V).
        token_ids: (B, T) int64.

    Returns:
        (B, T) float32, differentiable.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)  # (B, T)
    return chosen - scaled.logsumexp(dim=-1)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """−Σ_v p_v log p_v with p = softmax(logits / temperature), in nats, shape (B, T), float32, differentiable."""
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)  # (B, T, V)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
