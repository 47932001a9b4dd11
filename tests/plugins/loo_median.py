"""An advantage estimator of a user's own: each reward less the median of the others of its group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_pl.objective.custom import AdvantageEstimator, RewardedGroups


@dataclass
class LeaveOneOutMedian(AdvantageEstimator):
    """A_i = factor · (r_i − median of the other valid rewards of the group); 0 without others."""

    factor: float = 1.0

    def __call__(self, groups: RewardedGroups) -> Tensor:
        known = groups.rewards.masked_fill(~groups.valid, torch.nan)  # (P, G)
        others = known.unsqueeze(1).repeat(1, known.shape[1], 1)  # (P, G, G): row i of a group without its own i
        others.diagonal(dim1=1, dim2=2).fill_(torch.nan)
        median = others.nanquantile(0.5, dim=2)
        return (self.factor * (known - median)).nan_to_num(0.0)
