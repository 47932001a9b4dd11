"""One update by plain gradient descent at a rate of 1, so that weights move by their gradients."""

import copy

import torch
from transformers import PreTrainedModel

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.training.demonstrated import Demonstrated
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.update import PolicyUpdate, UpdateResult


def moved(
    policy: PreTrainedModel,
    experience: Experience,
    algorithm: GRPOAlgorithm,
    shown: Demonstrated | None = None,
    *,
    longest: int,
    max_tokens: int = 1000,
) -> tuple[torch.Tensor, UpdateResult]:
    """By how much each weight of a copy moves, in one vector."""
    ours = copy.deepcopy(policy)
    update = PolicyUpdate(
        algorithm=algorithm,
        optimization=Optimization(max_grad_norm=0.0),
        temperature=1.0,
        max_completion_length=longest,
        budget=TokenBudget(configured=max_tokens),
        seed=0,
        collective=Collective(),
        report=lambda *_: None,
        demonstrated=None if shown is None else lambda number: shown,
    )
    result = update.run(ours, torch.optim.SGD(ours.parameters(), lr=1.0), experience, lambda loss, _: loss.backward())
    pairs = zip(policy.parameters(), ours.parameters(), strict=True)
    return torch.cat([(b - a).detach().flatten() for a, b in pairs]), result
