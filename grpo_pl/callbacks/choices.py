"""``TellChoices``: one line at the start of a run: engine, scoring, micro-batch, types and devices that were chosen."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from grpo_pl.policy.logprobs import forward_mode, was_tried
from grpo_pl.training.module import GRPOModule


class TellChoices(Callback):
    """Prints after the first rollout of a process, when every choice has been made."""

    def __init__(self) -> None:
        self._told = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._told or not trainer.is_global_zero:
            return
        self._told = True
        Console(stderr=True).print(choices(cast(GRPOModule, pl_module)), highlight=False, soft_wrap=True)


def choices(module: GRPOModule) -> str:
    """Engine, way of scoring, micro-batch, and where and in which type the weights are."""
    policy, budget = module.require_policy(), module.budget
    how = "configured" if budget.configured is not None else "found"
    weights = next(policy.parameters())
    way = forward_mode(policy) if was_tried(policy) else "untried"
    staleness = module.trainer.datamodule.staleness  # type: ignore[attr-defined]
    ahead = (
        f"rollouts {staleness} updates old, corrected by {module.algorithm.correction}, drawn with "
        f"{getattr(module.engine, 'threads', None)} threads beside {torch.get_num_threads()} of the updates; "
    )
    in_parts = f"completions over several steps, corrected by {module.algorithm.correction}; "
    return (
        f"chosen: {module.engine.describe()}; {ahead if staleness else ''}"
        f"{in_parts if module.draws_in_parts else ''}"
        f"log-probabilities scored in the {way} way; "
        f"micro-batch of {budget.tokens} tokens ({how}); weights {str(weights.dtype).removeprefix('torch.')} on "
        f"{weights.device}, precision {module.trainer.precision}, processes "
        f"{module.trainer.world_size}."
    )
