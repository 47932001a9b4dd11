"""``Covariance``: keeps entropy up by the few tokens whose updates lower it most (Clip-Cov and KL-Cov)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from grpo_pl.functional import covariance
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.sampling import row_key
from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import CollectedTokens, Term

Kind = Literal["clip", "kl"]


@dataclass(frozen=True, kw_only=True)
class Covariance(Term):
    """Chooses tokens by (log π − mean log π) · (A − mean A) over the rollout, as scored before its first update. clip:
    some of those between ``low`` and ``high`` lose the policy term (Clip-Cov, eqs. 11 and 12); kl: those of the highest
    get a penalty of kl_coef · |log r|, weighed as the policy term is (KL-Cov, eqs. 13 and 14), which acts where a
    rollout is used for several updates.

    Source: Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
    arXiv:2505.22617.

    Raises:
        ValueError: a field is out of its range, or a teacher that makes advantages.
    """

    kind: Kind
    share: float = 2e-4
    """Share of tokens that are chosen, one at least (2e-4 for clip; 2e-3 to 2e-4 for kl)."""
    low: float = 1.0
    """Lower bound of the product in clip."""
    high: float = 5.0
    """Upper bound of the product in clip."""
    kl_coef: float = 1.0
    """Weight of the penalty in kl."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, Kind)
        if not 0 < self.share <= 1:
            raise ValueError(f"Covariance needs a share of tokens in (0, 1], got {self.share}.")
        if not -math.inf < self.low < self.high:
            raise ValueError(f"Covariance needs high above low, a finite number, got {self.high} and {self.low}.")
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"Covariance needs a kl_coef that is finite and not negative, got {self.kl_coef}.")

    @property
    def needs(self) -> Needs:
        return Needs(old_logprobs=True)

    @property
    def acts_at_zero(self) -> bool:
        return self.kind == "kl"

    def check(self, algorithm: Any) -> None:
        teacher = algorithm.needs.teacher
        if teacher is not None and not teacher.whole:
            raise ValueError("Covariance is that of rewards' advantages, not of a teacher's: leave out one of the two.")

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        chosen = covariance.select(
            collected.gather("old_logprobs"),
            collected.gather("advantages"),
            kind=self.kind,
            share=self.share,
            low=self.low,
            high=self.high,
            seed=row_key("covariance", collected.step),
        )
        return {"covariance_mask": collected.own(chosen)}

    def policy_loss(self, tokens: TokenBatch) -> Tensor | None:
        if self.kind == "clip":
            return None
        return self.kl_coef * covariance.held_back(tokens.log_ratio, tokens.more["covariance_mask"])

    def policy_mask(self, tokens: TokenBatch) -> Tensor | None:
        return ~tokens.more["covariance_mask"] if self.kind == "clip" else None

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        return {"covariance/chosen": tokens.more["covariance_mask"].to(tokens.logprobs.dtype)}
