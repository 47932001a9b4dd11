"""``Beside``: what an optimiser step learns from besides the rollout; by itself nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_pl.distributed.collective import Collective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count), both to be added over micro-batches and ranks."""


class Beside:
    """Examples of one optimiser step, the same on every process; here there are none."""

    share: float = 0.0
    """Their part of the loss."""

    def metrics(self, like: Tensor) -> Sums:
        """Of the step, on the device of ``like``."""
        return {}

    def parts(self, budget: int, collective: Collective) -> list[Any]:
        """This process's examples, cut into micro-batches of at most ``budget`` tokens, padding included."""
        return []

    @property
    def filler(self) -> Any:
        """A small micro-batch, for a process that has fewer than the others."""
        raise NotImplementedError

    def loss(self, model: PreTrainedModel, part: Any, *, pad_token_id: int) -> tuple[Tensor, Sums]:
        """A micro-batch's part of their loss, a sum over processes, and its metrics."""
        raise NotImplementedError
