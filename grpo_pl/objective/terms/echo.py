"""``ECHO``: the policy also learns to predict what its actions lead to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_pl.functional.losses import LossOutput
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Term
from grpo_pl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ECHO(Term):
    """coef · mean of −log π over the tokens that the environment wrote between the policy's turns, in a batch.

    Source: ECHO, arXiv:2605.24517, its λ; prime-rl takes 0.1.

    Raises:
        ValueError: ``coef`` is not finite and above 0, no environment, or a term that compares distributions at the
            policy's tokens alone.
    """

    coef: float
    """Weight of their mean cross-entropy, λ."""

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            raise ValueError(f"ECHO needs a coef above 0 and finite, got {self.coef}; null in its place removes it.")

    @property
    def needs(self) -> Needs:
        return Needs(observations=True)

    def check(self, algorithm: Any) -> None:
        teacher = algorithm.needs.teacher
        if teacher is not None and teacher.whole:
            raise ValueError(
                "ECHO asks for the tokens of observations, and a divergence from a teacher is compared at the policy's "
                "tokens alone: set divergence none, or leave out one of the two terms."
            )

    def check_run(self, *, sampling: SamplingParams, in_environment: bool) -> None:
        if not in_environment:
            raise ValueError("ECHO learns from observations, and there is no model.environment that writes any.")
        if sampling.thinking_budget is not None:
            raise ValueError(
                "ECHO would learn the fed end of a thought as an observation: set model.sampling.thinking_budget null, "
                "or leave the term out."
            )

    def extra(self, tokens: Mapping[str, Tensor]) -> LossOutput:
        weights = tokens["observation_weights"]  # 1 / number of the batch's observation tokens at those, 0 elsewhere
        observed = weights > 0
        surprise = -tokens["logprobs"].masked_fill(~observed, 0.0)
        sums = {"observation/nll": (surprise.detach().sum(), observed.sum())}
        return LossOutput(loss=self.coef * (weights * surprise).sum(), stats=sums)
