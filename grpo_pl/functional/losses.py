"""The policy loss in three independent choices: level of the ratio, surrogate, and weight of each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_pl.functional.kl import MAX_LOG_RATIO

Aggregation = Literal["sequence_mean", "token_mean", "constant"]
RatioLevel = Literal["token", "sequence", "geometric"]
Mismatch = Literal["none", "truncate_token", "truncate_sequence", "mask_token", "mask_sequence"]


def token_weights(
    mask: Tensor,
    *,
    aggregation: Aggregation,
    num_sequences: float,
    num_tokens: float,
    max_completion_length: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """w (B, T), 0 where masked; the loss is Σ w · token loss, so any split of the batch adds up to the same number.

    sequence_mean: 1 / (N · |o_i|), every completion weighs the same and long ones' tokens less (GRPO, DeepSeekMath
    eq. 3). token_mean: 1 / M, every token weighs the same (DAPO, arXiv:2503.14476, eq. 8). constant: 1 / (N · L),
    every token weighs the same and the loss is no ratio of random lengths (Dr. GRPO, arXiv:2503.20783, listing 1).

    Args:
        mask: (B, T) bool; a row without tokens has no weight but counts in N.
        num_sequences: N, completions of the global batch that count in the loss.
        num_tokens: M, their completion tokens.
        max_completion_length: L, the configured limit, never the padded width.
    """
    ones = mask.to(dtype)
    if aggregation == "sequence_mean":
        lengths = ones.sum(dim=1, keepdim=True).clamp(min=1)
        return ones / (lengths * max(num_sequences, 1))
    if aggregation == "token_mean":
        return ones / max(num_tokens, 1)
    return ones / (max(num_sequences, 1) * max_completion_length)


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π − log π_old, 0 where masked (whatever stands there, NaN included), clamped to ± MAX_LOG_RATIO."""
    return (logprobs - old_logprobs).masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _through_own_token(value: Tensor, log_ratio: Tensor) -> Tensor:
    """``value`` forwards, while the gradient reaches each token through its own log-ratio only."""
    return value.detach() * torch.exp(log_ratio - log_ratio.detach())


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """s_i = exp(mean_t log-ratio), the same for all tokens of a row (GSPO-token, arXiv:2507.18071, eqs. 7 and 14).

    The gradient of a token's term goes through that token alone; because all weights of a row are equal, the sum
    over the row has the gradient of GSPO's sequence objective (eq. 10). (B, T) in and out.
    """
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return _through_own_token(mean.exp().expand_as(log_ratio), log_ratio)


def geometric_ratio(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, *, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """exp(mean_t pessimistically clipped log-ratio) (GMPO, arXiv:2507.20673, eq. 4); the bounds are on the *log*-ratio.

    Per token the smaller of A·log r and A·clip(log r, −ε_low, ε_high) counts, like the minimum in PPO. (B, T).
    """
    clipped = log_ratio.clamp(-epsilon_low, epsilon_high)
    pessimistic = torch.where(advantages >= 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    return sequence_ratio(pessimistic, mask)


def clip_surrogate(
    ratio: Tensor, advantages: Tensor, *, epsilon_low: float, epsilon_high: float, dual_clip: float | None = None
) -> Tensor:
    """min(r·A, clip(r, 1−ε_low, 1+ε_high)·A); with dual clip, at least c·A where A < 0 (arXiv:1912.09729, eq. 5)."""
    pessimistic = torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    if dual_clip is None:
        return pessimistic
    return torch.where(advantages < 0, torch.maximum(pessimistic, dual_clip * advantages), pessimistic)


def cispo_surrogate(ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, low: float | None, high: float) -> Tensor:
    """stop_gradient(clamp(r, low, high)) · A · log π: clipped tokens keep a gradient (MiniMax-M1, arXiv:2506.13585,
    eq. 4)."""
    return ratio.detach().clamp(min=low, max=high) * advantages * logprobs


def sapo_surrogate(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float, temperature_negative: float
) -> Tensor:
    """4/τ · sigmoid(τ·(r − 1)) · A: a smooth gate in place of the clip, gradient 1 at r = 1 (SAPO,
    arXiv:2511.20347, eq. 6)."""
    positive = torch.full_like(ratio, temperature_positive)
    temperature = torch.where(advantages > 0, positive, torch.full_like(ratio, temperature_negative))
    return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


def mismatch_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, *, mode: Mismatch, low: float, high: float
) -> Tensor:
    """How much each token counts when another engine drew it: ρ = π_old / π_sampling, without gradient; (B, T).

    truncate_*: min(ρ, high) (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"); mask_*: ρ inside [low, high] and 0 outside (IcePop, arXiv:2510.18855, eq. 4).
    *_token: ρ per token; *_sequence: the product over the row.
    """
    log_rho = (old_logprobs - sampling_logprobs).detach().masked_fill(~mask, 0.0)
    if mode in ("truncate_sequence", "mask_sequence"):
        log_rho = log_rho.sum(dim=1, keepdim=True).expand_as(mask)
    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode in ("truncate_token", "truncate_sequence"):
        return rho.clamp(max=high)
    if mode in ("mask_token", "mask_sequence"):
        return rho.masked_fill((rho < low) | (rho > high), 0.0)
    return torch.ones_like(rho)
