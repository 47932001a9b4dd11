"""``StopOnSignal``: SIGTERM and Ctrl-C end a run with its last completed rollout saved."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer

from grpo_pl.rewards.base import RewardFailed
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.module import GRPOModule


class StopOnSignal(StepCallback):
    """SIGTERM and Ctrl-C end generation at the next token, or an update once it is complete, by ``RolloutInterrupted``.
    A second Ctrl-C ends the process at once.

    The handler only sets a flag: Lightning's own talks to other processes from inside the handler and can hang. The
    processes agree on the flag after each rollout and before each step, so one that was signalled alone suffices.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.received = None
        signal.signal(signal.SIGTERM, self._receive)  # in place of Lightning's, which restores what was there before
        self._before = signal.signal(signal.SIGINT, self._receive)

    def should_stop(self) -> bool:
        return self.received is not None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if cast(GRPOModule, pl_module).collective.any(self.should_stop(), pl_module.device):
            raise RolloutInterrupted("stopped by a signal")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Notes which signal it was. Prints an error with its rank at once: the first to fail makes the others fail."""
        if isinstance(exception, RolloutInterrupted):
            exception.signal = self.received
        elsewhere = isinstance(exception, RewardFailed) and exception.__cause__ is None  # on another process
        if isinstance(exception, RolloutInterrupted | KeyboardInterrupt) or elsewhere:
            return
        if trainer.world_size > 1:
            text = "".join(traceback.format_exception(exception))
            lines = "".join(f"[rank {trainer.global_rank}] {line}\n" for line in text.splitlines())
            print(lines, end="", file=sys.stderr, flush=True)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(signum)
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print("\nstopping after this rollout's work; Ctrl-C again stops at once", file=sys.stderr, flush=True)
