"""One completion whose tokens a test writes out: its loss with the slope at each token; and a rollout before its first
update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.base import CollectedTokens
from tests.losses import loss_of_tokens


def numbers(values: Any) -> Tensor:
    """In float64; integers and truths stay what they are."""
    found = values if isinstance(values, Tensor) else torch.tensor(values)
    return found.double() if found.is_floating_point() else found


@dataclass(frozen=True)
class Learned:
    """What a micro-batch of one completion gives."""

    loss: float
    slopes: list[float]  # of the loss, by the log-probability of each token
    sums: Mapping[str, tuple[float, float]]  # of metrics, with their counts


def learned(
    algorithm: GRPOAlgorithm,
    logprobs: Sequence[float],
    *,
    advantage: float = 0.0,
    weight: float = 1.0,
    mask: Sequence[bool] | None = None,
    **tokens: Any,
) -> Learned:
    """The loss of tokens of one completion; ``tokens`` are rows by name, of the one advantage or one for each."""
    now = numbers([logprobs]).requires_grad_()
    given = {"advantages": [advantage], **tokens}
    output = loss_of_tokens(
        algorithm,
        logprobs=now,
        mask=numbers([mask or [True] * len(logprobs)]),
        weights=torch.full_like(now, weight),
        **{name: numbers([row]) for name, row in given.items()},
    )
    (slopes,) = torch.autograd.grad(output.loss, now)
    sums = {name: (float(total), float(count)) for name, (total, count) in output.stats.items()}
    return Learned(loss=output.loss.item(), slopes=slopes[0].tolist(), sums=sums)


def collected(
    algorithm: GRPOAlgorithm, kept: Any, *, step: int = 0, more: Any = None, **tokens: Any
) -> CollectedTokens:
    """A rollout of one process; ``tokens`` are tables by name, ``more`` other fields of `CollectedTokens`."""
    return CollectedTokens(
        tokens={name: numbers(table) for name, table in tokens.items()},
        kept=numbers(kept),
        step=step,
        ranks=Collective(),
        grouping=algorithm.grouping,
        **(more or {}),
    )
