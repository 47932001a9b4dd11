"""Trust regions by the divergence of a token or of a whole completion: masks tokens that have left them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grpo_pl.functional.argument_checks import check_choice

Divergence = Literal["tv", "kl"]
_LEAST_REST = 1e-12
"""Share of all other tokens where rounding leaves them none, as in the authors' code."""


class LikelyTokens(NamedTuple):
    """The tokens that were likeliest at each place for the policy that drew there, (B, T, K) each."""

    logprobs: Tensor  # of the policy now, −inf where there are fewer than K
    sampling_logprobs: Tensor  # as the engine had them, −inf likewise
    drawn: Tensor  # bool: this is the token that was drawn; at most one a place

    @classmethod
    def of(cls, tokens: Mapping[str, Tensor]) -> LikelyTokens:
        """Those of a micro-batch, by the names that the pipeline gives them."""
        now = tokens["top_logprobs"]
        return cls(now, tokens["sampling_top_logprobs"].to(now.dtype), tokens["top_is_drawn"])


def binary_divergence(logprobs: Tensor, sampling_logprobs: Tensor, *, kind: Divergence) -> Tensor:
    """D between the policies' next-token distributions, reduced to "the drawn token" and "any other"; any shape.

    With π = e^logprobs and μ = e^sampling_logprobs of the drawn token: tv is |μ − π|, kl is KL(μ‖π) =
    μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π)), infinite where π is 1 and μ is not. A lower bound of the divergence of
    the whole distributions. No gradient.

    Raises:
        ValueError: there is no kind of that name.

    Source: DPPO, arXiv:2602.04879, eqs. 13 and 14.
    """
    check_choice("kind", kind, Divergence)
    log_pi, log_mu = logprobs.detach().clamp(max=0.0), sampling_logprobs.detach().clamp(max=0.0)
    mu = log_mu.exp()
    if kind == "tv":
        return (mu - log_pi.exp()).abs()
    others_mu, others_pi = -torch.expm1(log_mu), -torch.expm1(log_pi)
    # xlogy: nothing is left to the others where μ is 1, whatever π leaves to them
    others = torch.xlogy(others_mu, others_mu) - torch.xlogy(others_mu, others_pi)
    return mu * (log_mu - log_pi) + others


def top_divergence(logprobs: Tensor, sampling_logprobs: Tensor, likely: LikelyTokens, *, kind: Divergence) -> Tensor:
    """D between the policies' next-token distributions, reduced to the K likeliest tokens, the drawn one and "any
    other"; (B, T).

    With μ the policy that drew, A′ = TopK(μ, K) ∪ {drawn token}, p(other) = 1 − Σ_{a ∈ A′} p(a) and A″ = A′ ∪ {other}:
    tv is ½ Σ_{a ∈ A″} |μ(a) − π(a)|, kl is Σ_{a ∈ A″} μ(a) log(μ(a)/π(a)). A lower bound of the divergence of the whole
    distributions, equal to it where K is the vocabulary, and never below `binary_divergence`. No gradient. Computed in
    float64; what rounding of the log-probabilities leaves to "any other" counts as 1e-12 at least.

    Args:
        logprobs: (B, T), of the drawn token.
        sampling_logprobs: Likewise.

    Raises:
        ValueError: there is no kind of that name.

    Source: DPPO, arXiv:2602.04879, "Top-K approximation". The authors' code (sail-sg/Stable-RL, ``compute_topk_kl``)
    keeps K tokens in all: a drawn token that is not among the likeliest takes the place of the last. Here it comes on
    top of them, as in the paper.
    """
    check_choice("kind", kind, Divergence)
    alone = ~likely.drawn.any(dim=-1)  # its own event
    now, before = (
        torch.cat([of_likely, of_drawn.masked_fill(~alone, -torch.inf).unsqueeze(-1)], dim=-1).detach().double()
        for of_likely, of_drawn in ((likely.logprobs, logprobs), (likely.sampling_logprobs, sampling_logprobs))
    )  # (B, T, K + 1)
    pi, mu = now.exp(), before.exp()
    others_pi, others_mu = ((1.0 - p.sum(dim=-1)).clamp(min=_LEAST_REST) for p in (pi, mu))
    if kind == "tv":
        found = 0.5 * ((mu - pi).abs().sum(dim=-1) + (others_mu - others_pi).abs())
    else:
        events = torch.where(mu > 0, mu * (before - now), 0.0)  # −inf less −inf where there is no token
        found = events.sum(dim=-1) + others_mu * (others_mu / others_pi).log()
    return found.to(logprobs.dtype)


def outside(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    kind: Divergence,
    low: float,
    high: float,
    likely: LikelyTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens whose update would lead further out of the trust region, as two masks (B, T): too low, too high.

    Too low: A < 0, π < μ and D > ``low``; too high: A > 0, π > μ and D > ``high``. All others keep their term, also
    those far away that their advantage calls back. D is `binary_divergence`, or with ``likely`` `top_divergence`.

    Source: DPPO, arXiv:2602.04879, eq. 12.
    """
    if likely is None:
        divergence = binary_divergence(logprobs, sampling_logprobs, kind=kind)
    else:
        divergence = top_divergence(logprobs, sampling_logprobs, likely, kind=kind)
    too_low = (advantages < 0) & (logprobs < sampling_logprobs) & (divergence > low)
    too_high = (advantages > 0) & (logprobs > sampling_logprobs) & (divergence > high)
    return too_low, too_high


def off_policy(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """(B, T) bool: A < 0 in a completion that the policy has left: mean_t (log μ − log π) > ``limit``.

    The mean estimates KL(μ‖π) per token, of the whole completion and of both reasons to differ: the updates since, and
    an engine that draws from other probabilities. What is learnt from others' mistakes misleads; completions of
    positive advantage stay.

    Args:
        mask: (B, T) bool, whole completions; anything may stand elsewhere.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    gap = (sampling_logprobs - logprobs).detach().masked_fill(~mask, 0.0)
    mean = gap.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask & (advantages < 0) & (mean > limit)
