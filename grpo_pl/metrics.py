"""Metrics over groups of completions, as torchmetrics: exact over all ranks and batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class PassAtK(Metric):
    """pass@k = mean over problems of 1 − C(n − c, k) / C(n, k), with c of n samples correct.

    The unbiased estimator of Chen et al. 2021, "Evaluating large language models trained on code", eq. 1.

    Args:
        k: how many draws one may make; a problem needs at least ``k`` samples.
    """

    full_state_update = False
    higher_is_better = True
    passed: Tensor
    problems: Tensor

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}.")
        self.k = k
        self.add_state("passed", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("problems", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, correct: Tensor, valid: Tensor | None = None) -> None:
        """Adds problems.

        Args:
            correct: (P, n) bool, n >= k.
            valid: (P,) bool; problems that only fill a batch are false.

        Raises:
            ValueError: fewer than k samples a problem.
        """
        n = correct.shape[1]
        if n < self.k:
            raise ValueError(f"pass@{self.k} needs at least {self.k} samples a problem, got {n}.")
        valid = torch.ones(len(correct), dtype=torch.bool, device=correct.device) if valid is None else valid
        wrong = n - correct.sum(dim=1)  # (P,)
        # C(n - c, k) / C(n, k) as a product of k factors; a factor reaches 0 where fewer than k samples are wrong
        draws = torch.arange(self.k, device=correct.device)
        all_wrong = ((wrong[:, None] - draws).clamp(min=0) / (n - draws).double()).prod(dim=1)
        self.passed += ((1.0 - all_wrong) * valid).sum()
        self.problems += valid.sum()

    def compute(self) -> Tensor:
        return (self.passed / self.problems.clamp(min=1)).float()
