"""The policy loss, composed of three independent choices: level of the ratio, surrogate, and weight of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.kl import MAX_LOG_RATIO, clamp_log_ratio

Aggregation = Literal["sequence_mean", "token_mean", "constant", "sequence_sum"]
RatioLevel = Literal["token", "sequence", "geometric"]
Surrogate = Literal[
    "clip", "unclipped", "reinforce", "cispo_capped", "cispo_clamped", "sapo", "vespo", "dppo_tv", "dppo_kl", "nll",
]  # fmt: skip
Mismatch = Literal[
    "none", "truncate_token", "truncate_sequence", "mask_token", "mask_sequence", "reject_geometric", "seq_mask_tis",
]  # fmt: skip
DemonstrationWeighting = Literal["equal", "uncertain"]


@dataclass(frozen=True)
class LossOutput:
    """The contribution of a micro-batch to the loss and to the metrics."""

    loss: Tensor
    """Sum over tokens of weight × token loss; the sum over micro-batches and ranks is the loss of the batch."""
    stats: dict[str, tuple[Tensor, Tensor]]
    """Metric -> (sum over tokens, number of tokens), detached: add both over micro-batches and ranks, then divide."""


def token_weights(
    mask: Tensor,
    *,
    aggregation: Aggregation,
    num_sequences: float,
    num_tokens: float,
    max_completion_length: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """w (B, T), 0 where masked; the loss is Σ w · token loss, so it is the same for any split of the batch.

    sequence_mean: 1 / (N · |o_i|), every completion has the same weight, so tokens of long ones have less (GRPO,
    DeepSeekMath eq. 3). token_mean: 1 / M, every token has the same weight (DAPO, arXiv:2503.14476, eq. 8). constant:
    1 / (N · L), every token has the same weight, independent of the lengths of completions (Dr. GRPO,
    arXiv:2503.20783, listing 1). sequence_sum: 1 / N, the sum over a completion's tokens; with ``sequence_ratio`` it
    multiplies GSPO's loss of a completion by its length (LUSPO, arXiv:2602.05261; TRL's ``loss_type="luspo"``).

    Args:
        mask: (B, T) bool; a row without tokens has no weight but counts in N.
        num_sequences: N, completions of the global batch that count in the loss.
        num_tokens: M, their completion tokens.
        max_completion_length: L, the configured limit, never the padded width.

    Raises:
        ValueError: there is no aggregation of that name.
    """
    check_choice("aggregation", aggregation, Aggregation)
    ones = mask.to(dtype)
    if aggregation == "sequence_mean":
        lengths = ones.sum(dim=1, keepdim=True).clamp(min=1)
        return ones / (lengths * max(num_sequences, 1))
    if aggregation == "token_mean":
        return ones / max(num_tokens, 1)
    if aggregation == "sequence_sum":
        return ones / max(num_sequences, 1)
    return ones / (max(num_sequences, 1) * max_completion_length)


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π − log π_old (B, T), clamped to ± MAX_LOG_RATIO; 0 where masked, even if an input is NaN there.

    The clamp bounds the value and keeps the slope, see ``grpo_pl.functional.kl.clamp_log_ratio``.
    """
    return clamp_log_ratio((logprobs - old_logprobs).masked_fill(~mask, 0.0))


def _through_own_token(value: Tensor, log_ratio: Tensor) -> Tensor:
    """``value`` (B, T), with ``value`` as its gradient in ``log_ratio``: each token has a gradient in its own only."""
    return value.detach() * torch.exp(log_ratio - log_ratio.detach())


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """s_i = exp(mean_t log-ratio), the same for all tokens of a row (GSPO-token, arXiv:2507.18071, eqs. 7 and 14).

    The gradient of a token's term flows through that token only. Because the weights of a row are equal, the sum over
    the row has the gradient of GSPO's sequence objective (eq. 10). All tensors are (B, T).
    """
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return _through_own_token(mean.exp().expand_as(log_ratio), log_ratio)


def geometric_ratio(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, *, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """exp(mean_t clipped log-ratio), (B, T) (GMPO, arXiv:2507.20673); the bounds are on the *log*-ratio.

    Per token it uses log r or clip(log r, −ε_low, ε_high), whichever makes A·log r smaller, like the minimum in PPO.
    """
    clipped = log_ratio.clamp(-epsilon_low, epsilon_high)
    pessimistic = torch.where(advantages >= 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    return sequence_ratio(pessimistic, mask)


def importance_ratio(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, *, level: RatioLevel, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """The ratio (B, T) at ``level``: of each token, of the whole completion, or the clipped geometric mean.

    Raises:
        ValueError: there is no level of that name.
    """
    check_choice("level", level, RatioLevel)
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        return sequence_ratio(log_ratio, mask)
    return geometric_ratio(log_ratio, mask, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)


def clip_surrogate(
    ratio: Tensor, advantages: Tensor, *, epsilon_low: float, epsilon_high: float, dual_clip: float | None = None
) -> Tensor:
    """min(r·A, clip(r, 1−ε_low, 1+ε_high)·A), (B, T); with ``dual_clip`` c at least c·A if A < 0 (arXiv:1912.09729)."""
    pessimistic = torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    if dual_clip is None:
        return pessimistic
    return torch.where(advantages < 0, torch.maximum(pessimistic, dual_clip * advantages), pessimistic)


def cispo_surrogate(ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, low: float | None, high: float) -> Tensor:
    """sg(clamp(r, low, high)) · A · log π, (B, T); sg stops the gradient, and clipped tokens keep that of log π.

    Source: CISPO in MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    return ratio.detach().clamp(min=low, max=high) * advantages * logprobs


def sapo_surrogate(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float, temperature_negative: float
) -> Tensor:
    """4/τ · sigmoid(τ·(r − 1)) · A, (B, T): a smooth gate instead of the clip, with gradient A at r = 1.

    Source: SAPO, arXiv:2511.20347; there τ is 1.0 for positive and 1.05 for negative advantages.
    """
    positive = torch.full_like(ratio, temperature_positive)
    temperature = torch.where(advantages > 0, positive, torch.full_like(ratio, temperature_negative))
    return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


def vespo_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """φ(W) · A · log π, (B, T), with φ(W) = W^k · e^{λ(1 − W)} and W = Π_t r_t, the ratio of the whole completion.

    φ is 1 at W = 1, where its slope is k − λ, and falls to 0 on both sides, faster than any power of W above. It is a
    weight without gradient, so that each token keeps that of log π. W is not normalised by the length.

    Args:
        ratio: of each token, 1 where masked; rows are whole completions.
        positive: (k, λ) where A ≥ 0; the authors take (2, 3).
        negative: Likewise where A < 0, (3, 2).

    Source: VESPO, arXiv:2602.10693, with the numbers of TRL's ``GRPOTrainer.get_gamma_weights``.
    """
    log_w = ratio.detach().log().sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (B, 1)
    rising, falling = (
        torch.where(advantages >= 0, at_least_0, below) for at_least_0, below in zip(positive, negative, strict=True)
    )
    weight = (rising * log_w + falling * (1 - log_w.exp())).exp()
    return weight * advantages * logprobs


def surrogate(
    name: Surrogate,
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None,
    cispo_cap: float,
    sapo_temperatures: tuple[float, float],
    vespo: tuple[tuple[float, float], tuple[float, float]],
    level: RatioLevel = "token",
) -> Tensor:
    """The objective per token (B, T), by name: clip, unclipped r·A, reinforce A·log π, cispo_*, sapo, vespo, nll log π.

    dppo_* is r·A, too: which tokens lose it is up to ``grpo_pl.functional.trust_region``.

    Args:
        ratio: from ``importance_ratio`` at ``level``; a geometric one is clipped there and not again here.
        sapo_temperatures: τ for positive and for negative advantages.
        vespo: (k, λ) for advantages of at least 0, and for negative ones.

    Raises:
        ValueError: there is no surrogate or level of that name, or the surrogate cannot use a geometric ratio.
    """
    check_choice("surrogate", name, Surrogate)
    check_choice("level", level, RatioLevel)
    if level == "geometric":
        if name not in ("clip", "unclipped") or dual_clip is not None:
            raise ValueError(
                "level geometric has its own clipping: set surrogate clip and no dual_clip, "
                f"not {name} and {dual_clip}."
            )
        return ratio * advantages
    if name == "clip":
        return clip_surrogate(
            ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high, dual_clip=dual_clip
        )
    if name in ("unclipped", "dppo_tv", "dppo_kl"):
        return ratio * advantages
    if name == "reinforce":
        return advantages * logprobs
    if name == "cispo_capped":
        return cispo_surrogate(ratio, advantages, logprobs, low=None, high=cispo_cap)
    if name == "cispo_clamped":
        return cispo_surrogate(ratio, advantages, logprobs, low=1 - epsilon_low, high=1 + epsilon_high)
    if name == "sapo":
        positive, negative = sapo_temperatures
        return sapo_surrogate(ratio, advantages, temperature_positive=positive, temperature_negative=negative)
    if name == "vespo":
        return vespo_surrogate(ratio, advantages, logprobs, positive=vespo[0], negative=vespo[1])
    return logprobs


def mismatch_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, *, mode: Mismatch, low: float, high: float
) -> Tensor:
    """Weights (B, T) that correct for sampling by another engine, from ρ = π_old / π_sampling, without gradient.

    truncate_*: min(ρ, high) (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"); mask_*: ρ inside [low, high] and 0 outside (IcePop, arXiv:2510.18855).
    *_token: ρ per token; *_sequence: the product over the row; none: 1. reject_geometric: 1 where the row's geometric
    mean of ρ is inside [low, high] and 0 elsewhere, so that long rows are not rejected for their length alone (Liu et
    al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch"; verl's
    geometric rejection). seq_mask_tis: the same rows, and ρ of each token where the row is kept, without a bound
    (sequence-masked truncated importance sampling, OpenRLHF's ``PolicyLoss``).

    Raises:
        ValueError: there is no mode of that name.
    """
    check_choice("mode", mode, Mismatch)
    log_rho = (old_logprobs - sampling_logprobs).detach().masked_fill(~mask, 0.0)
    of_tokens = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode in ("truncate_sequence", "mask_sequence", "reject_geometric", "seq_mask_tis"):
        log_rho = log_rho.sum(dim=1, keepdim=True).expand_as(mask)
    if mode in ("reject_geometric", "seq_mask_tis"):
        log_rho = log_rho / mask.sum(dim=1, keepdim=True).clamp(min=1)
    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode in ("truncate_token", "truncate_sequence"):
        return rho.clamp(max=high)
    if mode in ("mask_token", "mask_sequence"):
        return rho.masked_fill((rho < low) | (rho > high), 0.0)
    if mode in ("reject_geometric", "seq_mask_tis"):
        kept = ((rho >= low) & (rho <= high)).to(rho.dtype)
        return kept if mode == "reject_geometric" else kept * of_tokens
    return torch.ones_like(rho)


def demonstration_losses(logprobs: Tensor, *, weighting: DemonstrationWeighting) -> Tensor:
    """−φ · log π of the tokens of demonstrations, any shape; φ is a weight without gradient.

    equal: φ = 1, the negative log-likelihood. uncertain: φ = π (1 − π), which is largest where the policy is undecided
    and leaves out what it knows already and what it finds impossible.

    Raises:
        ValueError: there is no weighting of that name.

    Source: CHORD, arXiv:2508.11408, CHORD-μ and CHORD-φ, as in ms-swift's ``compute_chord_loss``.
    """
    check_choice("weighting", weighting, DemonstrationWeighting)
    if weighting == "equal":
        return -logprobs
    probabilities = logprobs.detach().exp()
    return -probabilities * (1 - probabilities) * logprobs


def demonstration_share(rollout: int, *, first: float, last: float, decay_rollouts: int) -> float:
    """μ of a rollout: ``first``, falling by half a cosine over ``decay_rollouts`` to ``last``; (1 − μ) is left to the
    objective.

    Source: CHORD, arXiv:2508.11408; ms-swift's ``mu_schedule_function`` without a warm-up.
    """
    if rollout >= decay_rollouts:
        return last
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * rollout / decay_rollouts))
