"""Clip-Cov and KL-Cov: finds tokens of high covariance between log-probability and advantage."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_pl.functional.argument_checks import check_choice

CovarianceControl = Literal["none", "clip", "kl"]

_ROUNDING = 1e-4
"""Log-ratios up to this are rounding errors of two passes over the same weights, and their sign says nothing."""


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """(log π − mean log π) · (A − mean A) of each token, (N,) float64; their mean is the covariance of the batch.

    Along a policy gradient, entropy falls by this covariance: likely tokens of high advantage lower it, rare ones of
    high advantage raise it.

    Source: Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
    arXiv:2505.22617, eq. 10.
    """
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def select(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    kind: CovarianceControl,
    share: float,
    low: float,
    high: float,
    seed: int,
) -> Tensor:
    """(N,) bool: the tokens that lose their update (clip) or are held back (kl), ``share`` · N of them, 1 at least.

    clip: drawn at random among those whose covariance lies between ``low`` and ``high``, fewer where there are fewer;
    kl: those of highest covariance, the first ones of equals; none: no token.

    Args:
        logprobs: (N,) of all tokens of the batch, as scored before the first update.
        advantages: (N,) of the same tokens.
        seed: of the draw.

    Raises:
        ValueError: there is no kind of that name.

    Source: arXiv:2505.22617, eqs. 11 (Clip-Cov) and 13 (KL-Cov); 1 at least is its code's.
    """
    check_choice("kind", kind, CovarianceControl)
    selected = torch.zeros(len(logprobs), dtype=torch.bool)
    if kind == "none" or not len(logprobs):
        return selected.to(logprobs.device)
    found, count = covariances(logprobs, advantages).cpu(), max(1, int(share * len(logprobs)))
    if kind == "kl":
        selected[found.sort(descending=True, stable=True).indices[:count]] = True
    else:
        candidates = ((found > low) & (found < high)).nonzero().flatten()
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        selected[candidates[order[:count]]] = True
    return selected.to(logprobs.device)


def held_back(log_ratio: Tensor, selected: Tensor) -> Tensor:
    """|log π − log π_old| of the ``selected`` tokens, 0 elsewhere and within rounding; any shape.

    The authors' estimate of KL(π_old‖π) in eq. 14 (KL-Cov); its gradient pulls each token back with the same force,
    however far it is.
    """
    return log_ratio.abs() * (selected & (log_ratio.detach().abs() > _ROUNDING))
