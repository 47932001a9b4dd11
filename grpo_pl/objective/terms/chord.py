"""``CHORD``: learns from demonstrations beside the rollouts, by a share of the loss that may fall."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_pl.functional import losses
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.losses import DemonstrationWeighting
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Term


@dataclass(frozen=True, kw_only=True)
class CHORD(Term):
    """(1 − μ) · loss + μ · mean of −log π over the tokens of ``model.demonstrations``, with μ = ``coef`` at the start,
    and ``coef_final`` after ``decay_rollouts``.

    Source: CHORD, arXiv:2508.11408.

    Raises:
        ValueError: a field is out of its range, or a final share without a decay.
    """

    coef: float
    """Share μ of the loss, in (0, 1]; at the start where it decays."""
    coef_final: float = 0.0
    """The share after ``decay_rollouts``."""
    decay_rollouts: int = 0
    """Rollouts over which the share falls, by half a cosine; 0 keeps it."""
    weighting: DemonstrationWeighting = "equal"
    """Weight of a demonstration's token: equal, or uncertain: π (1 − π), so that what is known already and what seems
    impossible count little (CHORD-φ)."""

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, DemonstrationWeighting)
        if not 0 < self.coef <= 1 or not 0 <= self.coef_final <= 1:
            raise ValueError(
                f"CHORD needs coef in (0, 1] and coef_final in [0, 1], got {self.coef} and {self.coef_final}; null in "
                "its place removes it."
            )
        if self.decay_rollouts < 0:
            raise ValueError(f"CHORD needs decay_rollouts of 0 or more, got {self.decay_rollouts}.")
        if self.coef_final > 0 and self.decay_rollouts == 0:
            raise ValueError("CHORD's coef_final is the share after a decay: set decay_rollouts, or it to 0.")

    @property
    def needs(self) -> Needs:
        return Needs(demonstrations=self)

    def share(self, rollout: int) -> float:
        last = self.coef_final if self.decay_rollouts else self.coef
        return losses.demonstration_share(rollout, first=self.coef, last=last, decay_rollouts=self.decay_rollouts)

    def losses(self, logprobs: Tensor) -> Tensor:
        return losses.demonstration_losses(logprobs, weighting=self.weighting)
