"""``TopEntropyTokens``: only the tokens where the policy was least sure carry the policy term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import CollectedTokens, Term


@dataclass(frozen=True, kw_only=True)
class TopEntropyTokens(Term):
    """The policy term of a token counts where its entropy reaches that of the top ``quantile`` of all tokens of the
    rollout, as scored before its first update. KL, entropy bonus and the normaliser still cover all tokens.

    Source: "Beyond the 80/20 rule", arXiv:2506.01939; TRL's ``top_entropy_quantile``.

    Raises:
        ValueError: ``quantile`` is outside (0, 1).
    """

    quantile: float
    """Share of tokens, those of highest entropy."""

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ValueError(
                f"TopEntropyTokens needs a quantile in (0, 1), got {self.quantile}; null in its place removes it."
            )

    @property
    def needs(self) -> Needs:
        return Needs(old_entropy=True)

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        ranked = collected.gather("entropy").sort(descending=True).values
        if not len(ranked):
            return {"entropy_mask": collected.kept}
        least = ranked[max(1, round(self.quantile * len(ranked))) - 1]
        return {"entropy_mask": collected.tokens["entropy"] >= least}

    def policy_mask(self, tokens: TokenBatch) -> Tensor:
        return tokens.more["entropy_mask"]
