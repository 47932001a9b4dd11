"""Optimiser, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """AdamW and its learning-rate schedule. The rate is a function of the rollout number alone, so a
    resumed run needs no scheduler state. What is null is derived when a run starts (``grpo_pl.training.defaults``)."""

    lr: float | None = None
    """Peak learning rate; null derives it from the policy's size and from whether it was trained before."""
    warmup_rollouts: int | None = None
    """Rollouts over which the rate rises linearly to its peak; null derives them from the length of the run."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """How the rate falls from its peak to ``final_lr_fraction`` of it at the end of the run; null takes cosine for a
    policy from scratch, else constant."""
    final_lr_fraction: float = 0.0
    """Rate at the end, as a fraction of the peak; unused when constant."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's guard against division by zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them alone."""
    max_skipped_updates: int = 5
    """So many updates in a row with a loss or gradient that is not finite end the run."""

    def __post_init__(self) -> None:
        if self.lr is not None and not self.lr > 0.0:
            raise ValueError(f"optimization.lr must be positive, got {self.lr}.")
        if (self.warmup_rollouts or 0) < 0 or not 0.0 <= self.final_lr_fraction <= 1.0:
            raise ValueError(
                "optimization needs warmup_rollouts >= 0 and final_lr_fraction in [0, 1], got "
                f"{self.warmup_rollouts} and {self.final_lr_fraction}."
            )
        if self.max_grad_norm < 0.0 or self.max_skipped_updates < 1:
            raise ValueError(
                "optimization needs max_grad_norm >= 0 and max_skipped_updates >= 1, got "
                f"{self.max_grad_norm} and {self.max_skipped_updates}."
            )

    @property
    def peak(self) -> float:
        """The peak learning rate."""
        if self.lr is None:
            raise ValueError("optimization.lr is null, and no run has derived it: give a learning rate.")
        return self.lr

    def build(self, parameters: Iterable[Parameter]) -> torch.optim.AdamW:
        """The optimiser over those parameters that require a gradient."""
        return torch.optim.AdamW(
            [p for p in parameters if p.requires_grad],
            lr=self.peak,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )

    def configure(self, optimizer: torch.optim.Optimizer, *, rollout: int, total: int) -> None:
        """Sets every hyperparameter anew: a checkpoint restores those of the run that wrote it. A group's ``rate``, if
        it has one, is a factor of its learning rate."""
        lr = self.lr_at(rollout, total)
        for group in optimizer.param_groups:
            group.update(lr=group.get("rate", 1.0) * lr, weight_decay=self.weight_decay)
            if "betas" in group:  # AdamW's
                group.update(betas=self.betas, eps=self.eps)

    def lr_at(self, rollout: int, total: int) -> float:
        """Learning rate of the updates after rollout ``rollout`` (from 0) of ``total``.

        lr · (rollout + 1) / (warmup + 1) while warming up; then lr · (f + (1 − f) · d(x)), where x runs from 0 to 1
        over the rest of the run, f is ``final_lr_fraction``, and d is 1, 1 − x, or (1 + cos πx) / 2. Outside of a run,
        which derives them, null is no warm-up and a constant rate.
        """
        warm_up, schedule = self.warmup_rollouts or 0, self.schedule or "constant"
        if rollout < warm_up:
            return self.peak * (rollout + 1) / (warm_up + 1)
        x = min(1.0, (rollout - warm_up) / max(1, total - warm_up))
        decay = {"constant": 1.0, "linear": 1.0 - x, "cosine": 0.5 * (1.0 + math.cos(math.pi * x))}[schedule]
        floor = self.final_lr_fraction if schedule != "constant" else 0.0
        return self.peak * (floor + (1.0 - floor) * decay)

    def clip_gradients(self, parameters: Iterable[Parameter]) -> Tensor:
        """Scales the gradients down to ``max_grad_norm`` and returns their global norm from before, a scalar."""
        limit, by_mesh = self.max_grad_norm or math.inf, dict[Any, list[Parameter]]()
        for parameter in parameters:
            if parameter.grad is not None:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        gradients = [[parameter.grad for parameter in some] for some in by_mesh.values()]
        found = [torch.nn.utils.get_total_norm(some) for some in gradients]  # type: ignore[arg-type]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in found]  # FSDP2 gives DTensors
        norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
        for some in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(some, limit, norm)
        return norm


class TrainingDiverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that is not finite."""

    last_checkpoint: Path | None = None
    """The newest checkpoint of the run, from before it diverged."""

    def __str__(self) -> str:
        saved = self.last_checkpoint
        return f"{super().__str__()} " + (
            f"The last good checkpoint is {saved}." if saved else "No checkpoint was saved yet."
        )
