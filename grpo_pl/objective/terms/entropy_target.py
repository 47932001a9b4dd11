"""``EntropyTarget``: switches the entropy bonus on and off, so that the entropy stays near a target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import AdaptiveTerm, State


@dataclass(frozen=True, kw_only=True)
class EntropyTarget(AdaptiveTerm):
    """α = c · [H ≤ target] in the place of ``entropy_coef``; after each rollout c + coef_step where H ≤ target, else
    c − coef_step, within [0, coef_max]. c begins as ``entropy_coef``; H is the mean entropy of the rollout before,
    while it was learnt from.

    Source: Skywork-OR1, arXiv:2505.22312, "Adaptive Entropy Control": α_k = c_k · [e_k ≤ h], and c_{k+1} = c_k ± Δ from
    c_0 = 0. The paper has no bounds, and says nothing of e_k = h: there the authors' code (SkyworkAI/Skywork-OR1,
    ``EntController``) subtracts and TRL's ``use_adaptive_entropy`` adds, as here; both keep c within bounds. The
    paper's e_k is the entropy of the policy as it is; both codes know it from the step before.

    Raises:
        ValueError: a field is out of its range, or ``entropy_coef`` above ``coef_max``.
    """

    earlier_entry = "entropy_control"

    target: float
    """Nats a token."""
    coef_step: float = 0.005
    """Change of the weight from one rollout to the next."""
    coef_max: float = 1.0
    """Largest weight; the smallest is 0."""

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise ValueError(f"EntropyTarget needs a target above 0 and finite, got {self.target}.")
        if not 0 < self.coef_step <= self.coef_max < math.inf:
            raise ValueError(
                f"EntropyTarget moves the weight by coef_step={self.coef_step}: set it above 0 and at most "
                f"coef_max={self.coef_max}, which is finite."
            )

    @property
    def needs(self) -> Needs:
        return Needs(entropy=True)

    def check(self, algorithm: Any) -> None:
        if algorithm.entropy_coef > self.coef_max:
            raise ValueError(
                f"EntropyTarget begins with entropy_coef={algorithm.entropy_coef}: set it to coef_max={self.coef_max} "
                "at most."
            )

    def adapted(self, algorithm: Any, state: State) -> Any:
        coefficient = min(self._coefficient(algorithm, state), self.coef_max)  # which a resumed run may have lowered
        entropy = state.get("entropy")
        on = entropy is None or entropy <= self.target
        return replace(algorithm, entropy_coef=coefficient if on else 0.0)

    def observed(self, algorithm: Any, means: Mapping[str, float], state: State) -> State:
        entropy = means.get("entropy", math.nan)
        if not math.isfinite(entropy):
            return state
        step = self.coef_step if entropy <= self.target else -self.coef_step
        moved = min(self.coef_max, max(0.0, self._coefficient(algorithm, state) + step))
        return {"coefficient": moved, "entropy": entropy}

    def logged(self, state: State) -> Mapping[str, float]:
        found = state.get("coefficient")
        return {} if found is None else {"entropy_coef": found}

    @staticmethod
    def _coefficient(algorithm: Any, state: State) -> float:
        found = state.get("coefficient")
        return float(algorithm.entropy_coef if found is None else found)
