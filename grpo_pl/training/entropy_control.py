"""``EntropyControl``: moves the coefficient of the entropy bonus from rollout to rollout, towards a target entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_pl.objective.algorithm import GRPOAlgorithm


@dataclass
class EntropyControl:
    """The state of the control; it does nothing for an objective without ``entropy_target``."""

    coefficient: float | None = None
    """None before the first rollout: the objective's own ``entropy_coef``."""
    entropy: float | None = None
    """Of the last rollout that had any."""

    def objective(self, algorithm: GRPOAlgorithm) -> GRPOAlgorithm:
        """The objective with the coefficient of this rollout."""
        if algorithm.entropy_target is None:
            return algorithm
        coefficient = algorithm.entropy_coef if self.coefficient is None else self.coefficient
        coefficient = min(coefficient, algorithm.entropy_coef_max)  # which a resumed run may have lowered
        applied = applied_coefficient(coefficient, self.entropy, target=algorithm.entropy_target)
        return replace(algorithm, entropy_coef=applied)

    def observe(self, algorithm: GRPOAlgorithm, entropy: float | None) -> None:
        """Takes the mean entropy of the rollout's tokens while it was learnt from; None or NaN changes nothing."""
        if algorithm.entropy_target is None or entropy is None or not math.isfinite(entropy):
            return
        self.entropy = entropy
        self.coefficient = next_coefficient(
            algorithm.entropy_coef if self.coefficient is None else self.coefficient,
            entropy,
            target=algorithm.entropy_target,
            step=algorithm.entropy_coef_step,
            most=algorithm.entropy_coef_max,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient, self.entropy = state.get("coefficient"), state.get("entropy")


def next_coefficient(coefficient: float, entropy: float, *, target: float, step: float, most: float) -> float:
    """c + ``step`` where the entropy H is at most the target, else c − ``step``; within [0, ``most``].

    Source: Skywork-OR1, arXiv:2505.22312, "Adaptive Entropy Control": c_{k+1} = c_k + Δ where e_k < h and c_k − Δ where
    e_k > h, from c_0 = 0, for a target h. The paper has no bounds, and says nothing of e_k = h: there the authors' code
    (SkyworkAI/Skywork-OR1, ``EntController``) subtracts and TRL's ``use_adaptive_entropy`` adds, as here; both keep c
    within bounds.
    """
    moved = coefficient + step if entropy <= target else coefficient - step
    return min(most, max(0.0, moved))


def applied_coefficient(coefficient: float, entropy: float | None, *, target: float) -> float:
    """α = c · [H ≤ target], with H of the step before; None, before the first, counts as below.

    Source: as `next_coefficient`, α_k = c_k · [e_k ≤ h]. The paper's e_k is the entropy of the policy as it is; the
    authors' code and TRL's know it from the step before.
    """
    return coefficient if entropy is None or entropy <= target else 0.0
