"""``StopOnSigterm``: a run that its scheduler asks to go saves its last completed rollout and goes."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.module import GRPOModule
from grpo_pl.rollout.engine import RolloutInterrupted


class StopOnSigterm(Callback):
    """SIGTERM ends generation at the next token, or an update once it is complete, by ``RolloutInterrupted``.

    The handler only sets a flag: Lightning's own talks to other processes from inside the handler and can hang. The
    processes agree on the flag after each rollout and before each step, so one that was signalled alone suffices.
    """

    def __init__(self) -> None:
        self.received = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(GRPOModule, pl_module).should_stop = lambda: self.received
        signal.signal(signal.SIGTERM, self._receive)  # in place of Lightning's, which restores what was there before

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if cast(GRPOModule, pl_module).collective.any(self.received, pl_module.device):
            raise RolloutInterrupted("stopped by SIGTERM")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """One process's error soon makes the others fail too; this says at once which was first, and why."""
        if trainer.world_size > 1 and not isinstance(exception, RolloutInterrupted | KeyboardInterrupt):
            text = "".join(traceback.format_exception(exception))
            lines = "".join(f"[rank {trainer.global_rank}] {line}\n" for line in text.splitlines())
            print(lines, end="", file=sys.stderr, flush=True)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
