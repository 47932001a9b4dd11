"""``ProcessSupervision``: credits each token with the rewards of the reasoning steps that end behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_pl.functional.advantages import process_advantages
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import CollectedTokens, Term
from grpo_pl.objective.terms.parts import check_parts
from grpo_pl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ProcessSupervision(Term):
    """A_t = Σ over steps j that end at or after t of (r_j − mean) / (std + eps), with mean and standard deviation over
    all steps of the group.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.3.

    Raises:
        ValueError: an objective that does not compare steps so, or an environment.
    """

    @property
    def needs(self) -> Needs:
        return Needs(step_rewards=True)

    def check(self, algorithm: Any) -> None:
        check_parts(algorithm, "ProcessSupervision", part="step", advantage="token")
        if algorithm.baseline != "group_mean" or algorithm.scale not in ("group_std", "none"):
            raise ValueError(
                "ProcessSupervision normalises over the steps of a group: set baseline group_mean and scale group_std "
                f"or none, not {algorithm.baseline} and {algorithm.scale}."
            )
        if algorithm.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling compares outcome rewards, while ProcessSupervision learns from steps: set it to "
                "false."
            )

    def check_run(self, *, sampling: SamplingParams, in_environment: bool) -> None:
        if in_environment:
            raise ValueError(
                "ProcessSupervision credits parts of one text, and with model.environment a completion has many: take "
                "TurnReturns or GiGPO, or leave it out."
            )

    def credit(self, collected: CollectedTokens) -> Tensor:
        assert collected.steps is not None
        values, ends = collected.steps
        how = collected.grouping
        width = collected.kept.shape[1]
        return process_advantages(
            values, ends, group_size=how.group_size, width=width, scale=how.scale, ddof=how.ddof, eps=how.eps
        )
