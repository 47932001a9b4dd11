"""``Anchor``: holds the policy near what drew the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Term


@dataclass(frozen=True, kw_only=True)
class Anchor(Term):
    """coef · (log π − log π_sampling)² in the loss of each token.

    Source: Kimi K2.5, arXiv:2602.02276, its τ; prime-rl's ``kl_tau``, 1e-3 beside DPPO by total variation.

    Raises:
        ValueError: ``coef`` is not finite and above 0.
    """

    coef: float
    """Weight of the squared distance."""

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            raise ValueError(f"Anchor needs a coef above 0 and finite, got {self.coef}; null in its place removes it.")

    @property
    def needs(self) -> Needs:
        return Needs(sampling_logprobs=True)

    def loss(self, tokens: TokenBatch) -> Tensor:
        return self.coef * self._distance(tokens)

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        return {"sampling/anchor": self._distance(tokens)}

    @staticmethod
    def _distance(tokens: TokenBatch) -> Tensor:
        assert tokens.sampling_logprobs is not None
        return (tokens.logprobs - tokens.sampling_logprobs).square()
