"""``TopKTrustRegion``: DPPO's trust region by the likeliest tokens, in the place of the drawn one alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Term
from grpo_pl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class TopKTrustRegion(Term):
    """The divergence of surrogate ``dppo_tv`` and ``dppo_kl`` is that of the ``top_k`` tokens that were likeliest where
    the token was drawn, of the drawn one and of all others together, which the engine records.

    Source: DPPO, arXiv:2602.04879, "Top-K approximation"; the authors take 20.

    Raises:
        ValueError: ``top_k`` below 1, or another surrogate.
    """

    top_k: int
    """Tokens that the engine records at each place."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"TopKTrustRegion needs a top_k of at least 1, got {self.top_k}; null removes it.")

    @property
    def needs(self) -> Needs:
        return Needs(top_logprobs=self.top_k)

    def check(self, algorithm: Any) -> None:
        if not algorithm.bounds_divergence:
            raise ValueError(
                f"TopKTrustRegion belongs to surrogate dppo_tv and dppo_kl, and surrogate is {algorithm.surrogate}: "
                "set one of the two, or leave the term out."
            )

    def check_run(self, *, sampling: SamplingParams, in_environment: bool) -> None:
        if in_environment:
            raise ValueError(
                "TopKTrustRegion is for completions drawn in one turn: set model.environment null, or leave it out."
            )
