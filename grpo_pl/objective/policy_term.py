"""The policy term of each token: its surrogate, its weight where other weights have drawn, and their metrics."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from grpo_pl.functional import losses, trust_region
from grpo_pl.objective.custom import SurrogateObjective, TokenBatch
from grpo_pl.objective.fields import Objective

Stats = dict[str, Tensor]
"""Metrics of each token, (B, T), under TRL's names."""


def surrogate(a: Objective, tokens: TokenBatch) -> Tensor:
    """The objective of each token, (B, T), to be maximised."""
    if isinstance(a.surrogate, SurrogateObjective):
        return a.surrogate.checked(tokens)
    found = losses.surrogate(
        a.surrogate,
        tokens.ratio,
        tokens.advantages,
        tokens.logprobs,
        epsilon_low=a.epsilon_low,
        epsilon_high=a.epsilon_high,
        dual_clip=a.dual_clip,
        cispo_cap=a.cispo_cap,
        sapo_temperatures=(a.sapo_temperature_positive, a.sapo_temperature_negative),
        vespo=((a.vespo_k_positive, a.vespo_lambda_positive), (a.vespo_k_negative, a.vespo_lambda_negative)),
        level=a.ratio_level,
    )
    if not a.bounds_divergence:
        return found
    too_low, too_high = _outside(a, tokens)
    return found.masked_fill(too_low | too_high, 0.0)


def _outside(a: Objective, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """DPPO's masks of tokens that are too low and too high."""
    kind = cast(trust_region.Divergence, str(a.surrogate).removeprefix("dppo_"))
    return trust_region.outside(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        kind=kind,
        low=a.epsilon_low,
        high=a.epsilon_high,
        likely=tokens.likely,
    )


def sampler_weight(a: Objective, tokens: TokenBatch) -> tuple[Tensor | float, Stats]:
    """The weight of each token's policy term where another engine or earlier weights have drawn it, and its metrics."""
    if tokens.sampling_logprobs is None:
        return 1.0, {}
    old, drawn, stats = tokens.old_logprobs, tokens.sampling_logprobs, Stats()
    weight = torch.ones_like(drawn)
    if a.mismatch == "in_ratio":
        stats["sampling/importance_sampling_ratio/mean"] = tokens.ratio.detach()
        stats["sampling/sampling_logp_difference/mean"] = (tokens.logprobs.detach() - drawn).abs()
    elif not a.anchored_at_sampling:
        mode: losses.Mismatch = "none" if a.mismatch == "auto" else a.mismatch
        weight = losses.mismatch_weights(old, drawn, tokens.mask, mode=mode, low=a.mismatch_min, high=a.mismatch_max)
        stats["sampling/importance_sampling_ratio/mean"] = weight
        stats["sampling/sampling_logp_difference/mean"] = (old - drawn).abs()
        if mode != "none":
            most = math.inf if mode in ("reject_geometric", "seq_mask_tis") else a.mismatch_max
            cut = (weight >= most) | (weight == 0)
            stats["sampling/importance_sampling_ratio/cut_ratio"] = cut.to(weight.dtype)
    if a.off_policy_mask is not None:
        left = trust_region.off_policy(tokens.logprobs, drawn, tokens.advantages, tokens.mask, limit=a.off_policy_mask)
        weight = weight.masked_fill(left, 0.0)
        stats["sampling/off_policy_masked"] = left.to(weight.dtype)
    return weight, stats


def clip_stats(a: Objective, tokens: TokenBatch) -> Stats:
    """Per-token indicators under TRL's names; TRL's sequence-level ones count completions, these their tokens."""
    log_ratio, ratio, advantages = tokens.log_ratio, tokens.ratio, tokens.advantages
    stats = {"ratio/mean": log_ratio.exp()}
    if a.surrogate == "cispo_capped":
        stats["cispo_clip_ratio"] = ((ratio > a.cispo_cap) & (advantages > 0)).to(ratio.dtype)
    elif a.surrogate in ("clip", "cispo_clamped") or a.bounds_divergence:
        distance = log_ratio if a.ratio_level == "geometric" else ratio - 1
        low = (distance < -a.epsilon_low) & (advantages < 0)
        high = (distance > a.epsilon_high) & (advantages > 0)
        if a.bounds_divergence:
            low, high = _outside(a, tokens)
        clipped = {"low": low, "high": high, "region": low | high}
        stats |= {f"clip_ratio/{side}_mean": hit.to(ratio.dtype) for side, hit in clipped.items()}
    return stats
