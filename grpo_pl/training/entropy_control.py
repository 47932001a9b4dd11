"""``EntropyControl``: moves the coefficient of the entropy bonus from rollout to rollout, towards a target entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_pl.functional.entropy_control import applied_coefficient, next_coefficient
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
