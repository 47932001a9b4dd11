"""Rewards (P, G) to advantages (P, G), and the rewards of reasoning steps to advantages per token (B, T)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.exact_sums import from_float32, total_reward

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "greedy", "none"]
Scale = Literal["group_std", "group_mean", "batch_std", "token_whitening", "none"]


@dataclass(frozen=True)
class Advantages:
    """Rewards and advantages of one rollout, and which completions count in the loss, over the global batch."""

    rewards: Tensor  # (P, G) weighted sum of the rewards, before KL and overlong penalty; 0 where not valid
    valid: Tensor  # (P, G) bool: at least one reward of non-zero weight has a value
    advantages: Tensor  # (P, G), 0 where not kept
    keep: Tensor  # (P, G) bool: counts in the loss and in its normaliser
    active: Tensor  # (P, G) bool: needs a forward pass; the other kept rows add nothing to loss and gradient
    informative: Tensor  # (P,) bool: the group's rewards differ as they are aggregated, or only a teacher tells its
    # completions apart

    def totals(self, lengths: Tensor, rows: Tensor | None = None) -> tuple[int, int]:
        """(num_sequences, num_tokens) that normalise the loss: how many completions are kept, and their tokens.

        Args:
            lengths: (P, G) completion tokens.
            rows: indices into the flattened batch that one optimiser step covers on all ranks together; None = all.
        """
        keep, lengths = self.keep.flatten(), lengths.flatten()
        if rows is not None:
            keep, lengths = keep[rows], lengths[rows]
        return int(keep.sum()), int((lengths * keep).sum())


def combine_rewards(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """r = Σ_k weight_k · value_k over the rewards that have a value, summed exactly by `total_reward`.

    Args:
        values: (R, …), NaN where a reward could not be computed.
        weights: (R,).

    Returns:
        rewards (…) float64, 0 where invalid; valid (…) bool: at least one reward of non-zero weight has a value.

    Raises:
        ValueError: an infinite reward; other than R weights, a weight that is not finite, or only weights of 0.
    """
    if torch.isinf(values).any():
        raise ValueError("a reward is infinite: rewards must be finite, or None when they are unknown.")
    if weights.shape != values.shape[:1] or not torch.isfinite(weights).all() or not weights.any():
        raise ValueError(f"reward weights {weights.tolist()} for {len(values)} rewards: give each one, not all 0.")
    factors = [factor for factor in _written(weights) if factor is not None]
    rows = list(zip(*map(_written, values.flatten(1)), strict=True))
    totals = {row: total_reward(row, factors) for row in set(rows)}  # a small set: most rewards take few values
    found = torch.tensor([math.nan if totals[row] is None else totals[row] for row in rows], dtype=torch.float64)
    rewards = found.to(values.device).view(values.shape[1:])
    return rewards.nan_to_num(0.0), ~rewards.isnan()


def _written(numbers: Tensor) -> list[float | None]:
    """The numbers of a one-dimensional tensor as they were before rounding to float32; None for NaN."""
    short = numbers.dtype == torch.float32
    return [None if x != x else from_float32(x) if short else x for x in numbers.tolist()]


def masked_mean_std(values: Tensor, weights: Tensor, *, dim: int | None, ddof: int) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation along ``dim`` (of all entries if None); reduced axes keep size 1.

    ``weights`` count how often each value occurs (0/1, or tokens):
    mean = Σ w·x / Σ w, std² = Σ w·(x − mean)² / (Σ w − ddof), and std = 0 where Σ w ≤ ddof.
    """
    dims = tuple(range(values.dim())) if dim is None else (dim,)
    weights = weights.to(values.dtype)
    count = weights.sum(dims, keepdim=True)
    mean = (values * weights).sum(dims, keepdim=True) / count.clamp(min=1)
    squares = ((values - mean).square() * weights).sum(dims, keepdim=True)
    variance = torch.where(count > ddof, squares / (count - ddof).clamp(min=1), torch.zeros_like(squares))
    return mean, variance.sqrt()


def all_equal(values: Tensor, valid: Tensor, *, dim: int | None) -> Tensor:
    """True if the valid entries along ``dim`` (of all if None) are equal, as size-1 axes; true if none is valid."""
    dims = tuple(range(values.dim())) if dim is None else (dim,)
    high = values.masked_fill(~valid, -torch.inf).amax(dims, keepdim=True)
    low = values.masked_fill(~valid, torch.inf).amin(dims, keepdim=True)
    return high <= low


def informative_groups(rewards: Tensor, valid: Tensor) -> Tensor:
    """(P,) bool: the group's valid rewards differ, so their standard deviation is above 0 (DAPO, eq. 11)."""
    return ~all_equal(rewards, valid, dim=1).squeeze(1)


def subtract_baseline(rewards: Tensor, valid: Tensor, *, baseline: Baseline, greedy: Tensor | None = None) -> Tensor:
    """r − b, (P, G); 0 where invalid, and exactly 0 where all rewards in the mean b are equal, free of rounding errors.

    group_mean: b = mean of the group's valid rewards (DeepSeekMath §4.1.2); leave_one_out: mean of the others, result 0
    without others (RLOO, arXiv:2402.14740, section 2.3); batch_mean: mean of all valid rewards; greedy: the reward of
    the greedy completion, ``greedy`` (P,) (ReMax, arXiv:2310.10505, algorithm 2); none: b = 0.

    Raises:
        ValueError: there is no baseline of that name, or greedy without the greedy rewards.
    """
    check_choice("baseline", baseline, Baseline)
    if baseline == "none":
        return rewards * valid
    if baseline == "greedy":
        if greedy is None:
            raise ValueError("baseline 'greedy' needs the rewards of the greedy completions: pass greedy_values.")
        return (rewards - greedy.unsqueeze(1)) * valid
    dim = None if baseline == "batch_mean" else 1
    mean, _ = masked_mean_std(rewards, valid, dim=dim, ddof=0)
    centred = rewards - mean
    if baseline == "leave_one_out":
        count = valid.sum(1, keepdim=True)
        centred = centred * count / (count - 1).clamp(min=1)  # r − mean of the others = (r − mean) · n / (n − 1)
    return centred.masked_fill(all_equal(rewards, valid, dim=dim) | ~valid, 0.0)


def rescale(
    centred: Tensor, rewards: Tensor, valid: Tensor, lengths: Tensor, *, scale: Scale, ddof: int, eps: float
) -> Tensor:
    """centred / (std + eps), (P, G); 0 where invalid, and where all values are equal (else a rounding error over eps).

    group_std: std of the group's rewards (DeepSeekMath §4.1.2); group_mean: centred / mean of the group's rewards, each
    0 or 1, and 0 where none is 1 (MaxRL, arXiv:2602.02710, algorithm 1); batch_std: std of all rewards in the batch;
    token_whitening: (centred − mean) / (std + eps) with mean and std of ``centred`` over *tokens*: each completion
    counts as often as it has tokens, and one without tokens gets 0 (global normalisation of REINFORCE++,
    arXiv:2501.03262); none: ``centred`` (Dr. GRPO, arXiv:2503.20783, §3.1). All tensors are (P, G).

    Raises:
        ValueError: there is no scale of that name, or group_mean gets a reward other than 0 and 1.
    """
    check_choice("scale", scale, Scale)
    if scale == "none":
        return centred.masked_fill(~valid, 0.0)
    if scale == "group_mean":
        other = rewards[valid & (rewards != 0) & (rewards != 1)]
        if len(other):
            raise ValueError(
                f"scale group_mean (MaxRL) takes rewards of 0 and 1, got {other[0].item():g}: keep the correctness "
                "reward alone, give the other ones weight 0, or choose another scale."
            )
        mean, _ = masked_mean_std(rewards, valid, dim=1, ddof=0)
        return torch.where(valid & (mean > 0), centred / mean, torch.zeros_like(centred))
    if scale == "token_whitening":
        counted = valid & (lengths > 0)
        mean, std = masked_mean_std(centred, lengths * valid, dim=None, ddof=ddof)
        varies = ~all_equal(centred, counted, dim=None) & (std > 0)
        return torch.where(counted & varies, (centred - mean) / (std + eps), torch.zeros_like(centred))
    dim = 1 if scale == "group_std" else None
    _, std = masked_mean_std(rewards, valid, dim=dim, ddof=ddof)
    varies = ~all_equal(rewards, valid, dim=dim) & (std > 0)
    return torch.where(valid & varies, centred / (std + eps), torch.zeros_like(centred))


def normalize_each_reward(values: Tensor, weights: Tensor, valid: Tensor, *, ddof: int, eps: float) -> Tensor:
    """s = Σ_k weight_k · (value_k − group mean_k) / (group std_k + eps), divided by (batch std of s + eps); (P, G).

    Each reward is normalised before the sum, so that a reward with a wide range does not hide the others (GDPO,
    arXiv:2601.05242). The batch mean of s is 0 by construction and is not subtracted again.

    Args:
        values: (R, P, G), NaN where a reward could not be computed; it then adds 0.
        weights: (R,).
        valid: (P, G), from ``combine_rewards``.
    """
    lengths, normalized = torch.ones_like(valid), []
    for value in values:
        present = ~value.isnan()
        filled = value.nan_to_num(0.0)
        centred = subtract_baseline(filled, present, baseline="group_mean")
        scaled = rescale(centred, filled, present, lengths, scale="group_std", ddof=ddof, eps=eps)
        normalized.append(scaled.masked_fill(~present, torch.nan))
    total, _ = combine_rewards(torch.stack(normalized), weights)
    return rescale(total, total, valid, lengths, scale="batch_std", ddof=ddof, eps=eps)


def keep_best(rewards: Tensor, valid: Tensor) -> Tensor:
    """(P, G): the highest reward of each group, ties included; all other rewards become 0."""
    best = rewards.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    return torch.where(valid & (rewards == best), rewards, torch.zeros_like(rewards))


def overlong_penalty(lengths: Tensor, *, max_completion_length: int, buffer: float) -> Tensor:
    """−clamp((length − (L − c)) / c, 0, 1): 0 up to L − c tokens, −1 from L tokens on; any shape.

    L = ``max_completion_length``, c = ``buffer`` · L, ``buffer`` in (0, 1]. DAPO, arXiv:2503.14476, eq. 13.

    Raises:
        ValueError: a buffer outside (0, 1].
    """
    if not 0 < buffer <= 1:
        raise ValueError(f"buffer must lie in (0, 1], got {buffer}.")
    cache = buffer * max_completion_length
    return -((lengths - (max_completion_length - cache)) / cache).clamp(0.0, 1.0)


def process_advantages(
    step_values: Tensor, step_ends: Tensor, *, group_size: int, width: int, scale: Scale, ddof: int, eps: float
) -> Tensor:
    """A_t = Σ over steps j that end at or after t of (value_j − mean) / (std + eps) (DeepSeekMath §4.1.3).

    Mean and standard deviation run over all steps of all completions of the group.

    Args:
        step_values: (B, K) reward of each step, NaN where there is no step or its reward could not be computed.
        step_ends: (B, K) int64, index of the last token of each step in 0 … width − 1; ignored where NaN.
        group_size: G; the G completions of one prompt are neighbours, B = P·G.
        width: T, the padded completion length.

    Returns:
        (B, T); 0 for tokens after the last step and for rows without steps.

    Raises:
        ValueError: an infinite value, a step that ends outside 0 … width − 1, or no scale of that name.
    """
    if torch.isinf(step_values).any():
        raise ValueError("a step's reward is infinite: step rewards must be finite, or NaN when they are unknown.")
    valid = ~step_values.isnan()
    ends = step_ends.masked_fill(~valid, 0)
    if ((ends < 0) | (ends >= width))[valid].any():
        raise ValueError(f"a step ends outside the completion's tokens 0 … {width - 1}: {ends.tolist()}.")
    values = step_values.double().nan_to_num(0.0).unflatten(0, (-1, group_size)).flatten(1)  # (P, G·K)
    present = valid.unflatten(0, (-1, group_size)).flatten(1)
    centred = subtract_baseline(values, present, baseline="group_mean")
    scaled = rescale(centred, values, present, torch.ones_like(present), scale=scale, ddof=ddof, eps=eps)
    scaled = scaled.reshape(step_values.shape)  # (B, K), 0 where there is no step
    # on the CPU: a GPU has no deterministic cumsum of floats
    at_end = torch.zeros(len(scaled), width, dtype=torch.float64).scatter_add(1, ends.cpu(), scaled.cpu())
    return at_end.flip(1).cumsum(1).flip(1).to(step_values)


def reweighed(advantages: Tensor, gap: Tensor, *, share: float, clip: float) -> Tensor:
    """A · ((1 − λ) + λ · clip(e^{sign(A) · gap}, 1 − ε, 1 + ε)) of each token, (B, T): a teacher spreads an advantage
    over the tokens of a completion and never turns its sign.

    Args:
        advantages: (B, T) or (B, 1).
        gap: (B, T) log π_teacher − log π, without gradient; 0 leaves a token as it is.
        share: λ in [0, 1].
        clip: ε.

    Source: RLSD, arXiv:2604.03128, as in ms-swift's ``apply_rlsd_reweight``.
    """
    evidence = (advantages.sign() * gap).exp().clamp(1 - clip, 1 + clip)
    return advantages * ((1 - share) + share * evidence)
