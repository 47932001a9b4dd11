"""``StageProfile``: where the time of a step goes, and how close rollout and update come to what the machine can do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from grpo_pl.evaluation.report import number_table
from grpo_pl.functional.gemm import product
from grpo_pl.training.experience import Experience
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.stopwatch import stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STAGES = {
    "rollout": "rollout",
    "wait": "waiting for a rollout drawn ahead",
    "reward": "reward",
    "logprobs": "old and reference log-probabilities",
    "teacher": "the teachers' scores",
    "backward": "forward and backward",
    "optimizer": "optimiser",
}
"""Key of ``time/<key>`` -> what the table calls it."""

_MOST_MEASURED = 1 << 26  # elements: more are no faster, and would need memory that a run may not have left


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Measured peak speed of a device with the policy's dtype."""

    flops: float
    """Floating-point operations per second, in a product of large square matrices."""
    weights_per_second: float
    """Parameters per second, in the product of a matrix as large as the policy with a vector."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least that a step has to compute."""

    decoding: Counter[int]
    """Rows that are alive -> token positions of the rollout with so many, the first one left out."""
    prefilled: int
    """Prompt tokens, once per group."""
    updated: int
    """Tokens of forward and backward passes, a group's prompt once, over all passes."""

    def __add__(self, other: Work) -> Work:
        return Work(
            decoding=self.decoding + other.decoding,
            prefilled=self.prefilled + other.prefilled,
            updated=self.updated + other.updated,
        )


class StageProfile(Callback):
    """Prints, at the end of ``fit``, seconds per step and stage, without the first step, which warms up.

    The limits are rooflines: decoding reads all weights for each token position or computes 2·N for each living row,
    whichever takes longer; a prompt token costs 2·N, a token of the update 6·N (8·N with activation checkpointing, 4·N
    where only adapters learn), N being the parameters in matrix products. Attention itself is left out, and so are
    rollouts that dynamic sampling discards and greedy baselines, whose time counts. Between the steps there are
    validation, checkpoints, logging and other callbacks.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.wall = 0.0
        self.steps = 0
        self.work = Work(decoding=Counter(), prefilled=0, updated=0)
        self._start: float | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        if self._start is None:  # the step that has ended was the first
            self._start = time.perf_counter()
            return
        metrics = trainer.callback_metrics
        for stage, key in {"step": "step_time", **{stage: f"time/{stage}" for stage in STAGES}}.items():
            if key in metrics:  # a rollout is drawn in the step or waited for
                self.seconds[stage] = self.seconds.get(stage, 0.0) + float(metrics[key])
        self.steps += 1
        self.work += work_of(outputs["experience"], passes=pl_module.algorithm.num_iterations)
        self.wall = time.perf_counter() - self._start

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        if not trainer.is_global_zero:
            return
        if not self.steps:
            Console().print("profile     needs two steps at least: the first one warms up")
            return
        policy = pl_module.require_policy()
        rollout, backward = bound(self.work, policy, measure_limits(policy))
        Console().print(self.table(rollout=rollout, backward=backward))

    def table(self, **bounds: float) -> Table:
        """Seconds per step, share of the time, and the ``bounds`` of all steps over the time that their stage took."""
        title = f"time of a step, mean of {self.steps}"
        table = number_table(title, "seconds", "share", "of the machine's limit")
        rows = {stage: self.seconds[stage] for stage in STAGES if stage in self.seconds}
        step, stages = self.seconds["step"], sum(rows.values())
        rows |= {"idle": step - stages, "between steps": max(0.0, self.wall - step)}
        for stage, seconds in rows.items():
            reached = f"{bounds[stage] / seconds:.0%}" if stage in bounds and seconds else ""
            share = f"{seconds / max(self.wall, step):.1%}"
            table.add_row(STAGES.get(stage, stage), f"{seconds / self.steps:.3f}", share, reached)
        return table


def work_of(experience: Experience, *, passes: int) -> Work:
    """The work of this rank in one step."""
    rollout = experience.rollout
    lengths, active = rollout.lengths, experience.active
    prompts = rollout.prompt_mask.sum(dim=1).view(-1, rollout.group_size)
    any_active = active.view(-1, rollout.group_size).any(dim=1)
    alive = rollout.completion_mask.sum(dim=0).tolist()
    return Work(
        decoding=Counter(int(rows) for rows in alive[1:] if rows),
        prefilled=int(prompts[:, 0].sum()),
        updated=passes * int(lengths[active].sum() + prompts[any_active, 0].sum()),
    )


def bound(work: Work, policy: PreTrainedModel, limits: Limits) -> tuple[float, float]:
    """Seconds that the rollout and the passes of the update take at least."""
    parameters = multiplied_parameters(policy)
    trains_all = all(p.requires_grad for p in policy.parameters())
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in policy.modules())
    cost = (6 if trains_all else 4) + (2 if checkpointing else 0)
    read = parameters / limits.weights_per_second
    decoding = sum(
        positions * max(read, 2 * parameters * rows / limits.flops) for rows, positions in work.decoding.items()
    )
    rollout = decoding + 2 * parameters * work.prefilled / limits.flops
    return rollout, cost * parameters * work.updated / limits.flops


def multiplied_parameters(policy: PreTrainedModel) -> int:
    """Parameters in matrix products: all matrices, the head once, an embedding that is not the head left out."""
    matrices = {id(p): p.numel() for p in policy.parameters() if p.dim() >= 2}
    embedding = policy.get_input_embeddings().weight
    if policy.get_output_embeddings().weight is not embedding:
        matrices.pop(id(embedding), None)
    return sum(matrices.values())


def measure_limits(policy: PreTrainedModel) -> Limits:
    """Times products of matrices on the policy's device, of 256 MiB at most in float32."""
    device, dtype = policy.device, policy.dtype
    size = 8192 if device.type == "cuda" else 1024
    square = torch.randn(size, size, device=device, dtype=dtype)
    width = 1024
    size_of_all = min(multiplied_parameters(policy), _MOST_MEASURED)
    matrix = torch.randn(max(1, size_of_all // width), width, device=device, dtype=dtype)
    vector = torch.randn(width, device=device, dtype=dtype)
    fastest = min(_fastest(lambda: square @ square), _fastest(lambda: product(square, square)))
    return Limits(
        flops=2 * size**3 / fastest,
        weights_per_second=matrix.numel() / _fastest(lambda: matrix @ vector),
    )


def _fastest(run: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(5):
        taken: dict[str, float] = {}
        with stopwatch(taken, "run"):
            run()
        seconds.append(taken["run"])
    return min(seconds)
