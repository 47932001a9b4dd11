"""The Bradley–Terry loss of a reward model on pairs of completions, and how often it agrees with them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(r_w − r_l), (N,), for the scores r_w of preferred and r_l of other completions, (N,) each.

    The negative log-likelihood of P(w ≻ l) = exp(r_w) / (exp(r_w) + exp(r_l)); its gradient by r_w is σ(r_w − r_l) − 1.
    Bradley and Terry, "Rank Analysis of Incomplete Block Designs" (1952); as the loss of a reward model: Ouyang et al.
    2022, arXiv:2203.02155, equation 1.
    """
    return -F.logsigmoid(chosen - rejected)  # softplus is linear above 20, which float64 tells apart


def agreements(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where r_w > r_l, 1/2 where they are equal, else 0: (N,) float64."""
    return (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
