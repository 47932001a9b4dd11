"""Which coefficient an entropy bonus has in the next step, so that the entropy stays near a target."""

from __future__ import annotations


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
