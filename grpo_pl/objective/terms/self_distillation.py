"""``SelfDistillation``: the policy with more in its prompt is its own teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.objective.needs import Teaching
from grpo_pl.objective.terms.distillation import Distillation

Weights = Literal["start", "live", "average"]


@dataclass(frozen=True, kw_only=True)
class SelfDistillation(Distillation):
    """`Distillation` with π_T(token | question, privileged text), where ``model.privileged`` says what the text is.

    Source: OPSD, arXiv:2601.18734 (start); SDFT, arXiv:2601.19897 (live); SDPO, arXiv:2601.20802 (average).

    Raises:
        ValueError: as `Distillation`; ``rate`` is outside (0, 1].
    """

    weights: Weights
    """The teacher's: the policy as it started, as it is when the rollout is scored, or a moving average of it."""
    rate: float = 0.05
    """Share of the policy in average after each rollout, in (0, 1] (TRL's teacher_update_rate)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("weights", self.weights, Weights)
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must lie in (0, 1], 1 being a copy, got {self.rate}.")

    def _teaching(self) -> Teaching:
        return replace(super()._teaching(), weights=self.weights, rate=self.rate)
