"""Lines of a fit about itself: at its start engine, scoring and types, then whether it can learn at all, at its end the
numbers before and after."""

from __future__ import annotations

import time
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console

from grpo_pl.evaluation.curves import CAUSES, SILENT_ROLLOUTS, SilentRollouts
from grpo_pl.evaluation.report import number_table
from grpo_pl.files.runs import RunFolder
from grpo_pl.functional.accelerated import missing_kernels
from grpo_pl.policy.logprobs import forward_mode, tried_mode
from grpo_pl.training.module import GRPOModule


class StartSummary(Callback):
    """Prints one line after the first rollout of a process, when engine, scoring, micro-batch and types are chosen."""

    def __init__(self) -> None:
        self._told = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._told or not trainer.is_global_zero:
            return
        self._told = True
        Console(stderr=True).print(start_summary(cast(GRPOModule, pl_module)), highlight=False, soft_wrap=True)


def start_summary(module: GRPOModule) -> str:
    """Engine, way of scoring, micro-batch, and device and type of the weights."""
    policy, budget = module.require_policy(), module.budget
    how = "configured" if budget.configured is not None else "found"
    weights = next(policy.parameters())
    way = "untried" if tried_mode(policy) is None else forward_mode(policy)
    return (
        f"chosen: {module.engine.describe()}; {module.source.describe(module.algorithm, module.engine)}"
        f"log-probabilities scored in the {way} way; "
        f"micro-batch of {budget.tokens} tokens ({how}); weights {str(weights.dtype).removeprefix('torch.')} on "
        f"{weights.device}, precision {module.trainer.precision}, processes "
        f"{module.trainer.world_size}."
    )


class SignalWatch(Callback):
    """Warns once a run, also over a resume, where nothing can be learnt: rewards are equal in every group."""

    def __init__(self) -> None:
        self._silent = SilentRollouts()
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._silent.in_a_row, "warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._silent, self._warned = SilentRollouts(state_dict["in_a_row"]), state_dict["warned"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        equal = not bool(outputs["experience"].statistics.informative.any())
        if self._silent.add(batch.step + 1, float(equal)) and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"No learning signal: the rewards of every group were equal for {SILENT_ROLLOUTS} rollouts. {CAUSES}"
            )


SHOWN = {"pass@1": "pass@1 (sampled)", "greedy": "greedy", "reward": "reward"}
"""Last parts of the names of held-out numbers."""
TRAINING = "completions/correct"
"""Share of the completions of a training rollout that are right."""


class ClosingTable(Callback):
    """Prints held-out numbers before and after, once ``fit`` has ended.

    Args:
        folder: the run's folder.
        next_command: what to type next.
    """

    def __init__(self, folder: RunFolder, next_command: str) -> None:
        self.folder, self.next_command = folder, next_command
        self._started = time.monotonic()
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first = state_dict["first"]  # held-out numbers before the run, not before its resume

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        numbers = trainer.callback_metrics.items()
        self._last = {name: float(value) for name, value in numbers if _title(name) is not None}
        self._first = self._first or self._last

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        table = number_table("held-out problems", "before", "after")
        for name, value in self._last.items():
            before = self._first.get(name)  # not there in a checkpoint of a version that kept fewer
            table.add_row(_title(name), "–" if before is None else f"{before:.3f}", f"{value:.3f}")
        console = Console()
        console.print(table)
        right = trainer.callback_metrics.get(TRAINING)
        if right is not None:
            console.print(f"training    {float(right):.3f} of the last rollout's completions right", highlight=False)
        written = self.folder.last_checkpoint.exists()  # not after trainer.fast_dev_run
        next_command = self.next_command if written else f"grpo-pl serve --model {self.folder.export}"
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        files = {
            "metrics": self.folder.metrics,
            "report": self.folder.report,
            "checkpoint": self.folder.last_checkpoint,
            "model": self.folder.export,
        }
        missing = missing_kernels(trainer.strategy.root_device)
        lines = [
            f"time        {minutes} min {seconds:02d} s",
            *([f"kernels     none on this GPU, torch computed, several times slower: {missing}"] if missing else []),
            *(f"{name:<12}{path}" for name, path in files.items() if path.exists()),
            f"next        {next_command}",
        ]
        console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _title(metric: str) -> str | None:
    """The table's name for ``val/…`` or ``val/<set>/…``; None for numbers that it leaves out."""
    if metric.startswith("val/rewards/"):
        return f"reward {metric.removeprefix('val/rewards/')}"
    parts = metric.split("/")
    if parts[0] != "val" or len(parts) not in (2, 3) or parts[-1] not in SHOWN:
        return None
    return ": ".join([*parts[1:-1], SHOWN[parts[-1]]])
