"""``ClosingTable``: what a run gained, how long it took, where things are, and what to type next."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from grpo_pl.evaluation.report import number_table
from grpo_pl.files.runs import RunFolder

SHOWN = {"val/pass@1": "pass@1 (sampled)", "val/greedy": "greedy"}
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
        self._last = {name: float(value) for name, value in trainer.callback_metrics.items() if name in SHOWN}
        self._first = self._first or self._last

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        table = number_table("held-out problems", "before", "after")
        for name, title in SHOWN.items():
            if name in self._last:
                table.add_row(title, f"{self._first[name]:.3f}", f"{self._last[name]:.3f}")
        console = Console()
        console.print(table)
        right = trainer.callback_metrics.get(TRAINING)
        if right is not None:
            console.print(f"training    {float(right):.3f} of the last rollout's completions right", highlight=False)
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        console.print(
            f"time        {minutes} min {seconds:02d} s\n"
            f"metrics     {self.folder.metrics}\n"
            f"report      {self.folder.report}\n"
            f"checkpoint  {self.folder.last_checkpoint}\n"
            f"model       {self.folder.export}\n"
            f"next        {self.next_command}",
            highlight=False,
            soft_wrap=True,
        )
