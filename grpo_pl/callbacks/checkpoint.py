"""``RolloutCheckpoint``: saves every so many rollouts or minutes; the newest checkpoints stay, and the best ones."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.files.checkpoints import LAST, PATTERN, CheckpointError, annotate, checkpoint_path, facts_of, remove, seal
from grpo_pl.files.writing import best_effort, link_atomically
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rewards.base import RewardFailed, correctness_index
from grpo_pl.rollout.engine import EngineDied, PolicyDiverged, RolloutInterrupted
from grpo_pl.training.lightning_loops import completed_rollouts, set_progress
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import TrainingDiverged
from grpo_pl.training.weight_sync import OutOfSync

BEST = "best.ckpt"
"""Link to the checkpoint with the highest value of ``monitor``."""


class RolloutCheckpoint(Checkpoint):
    """Saves between two rollouts, when everything that belongs to the completed ones is logged and validated.

    Lightning's ModelCheckpoint counts optimiser steps; a run is counted in rollouts, which may take several. What is
    saved depends on the number of completed rollouts alone, not on the moment: a run that was resumed writes the same
    checkpoints as one that was not.

    Args:
        every_n_rollouts: rollouts between two checkpoints; 0 leaves it to ``every_n_minutes`` and the end of the run.
        every_n_minutes: also save when this much time has passed since the last checkpoint.
        keep: newest checkpoints that stay.
        keep_best: checkpoints with the highest ``monitor`` that stay besides; each validation may add one.
        monitor: a validation metric; higher is better. Null takes ``val/pass@1``, or ``val/reward`` where no reward has
            ``correctness``.
    """

    def __init__(
        self,
        every_n_rollouts: int = 25,
        every_n_minutes: float | None = None,
        keep: int = 2,
        keep_best: int = 1,
        monitor: str | None = None,
    ) -> None:
        super().__init__()
        check_at_least(0, "checkpoint", every_n_rollouts=every_n_rollouts, keep_best=keep_best)
        check_at_least(1, "checkpoint", keep=keep)
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise ValueError(f"checkpoint.every_n_minutes must be positive or null, got {every_n_minutes}.")
        self.every_n_rollouts, self.every_n_minutes = every_n_rollouts, every_n_minutes
        self.keep, self.keep_best, self.monitor = keep, keep_best, monitor
        self.folder: Path | None = None
        """Set by the command line to the run's folder; None saves nothing."""
        self._monitored = ""  # the metric of this run, which `setup` finds
        self._saved_at = 0  # there is nothing to save before the first rollout
        self._saved_time = time.monotonic()

    # --- Lightning's hooks ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        shared = trainer.strategy.broadcast(self.folder)  # the first process has claimed it
        self.folder = shared if stage == "fit" else None
        if self.monitor is None:
            judged = correctness_index(cast(GRPOModule, pl_module).rewards) is not None
            self._monitored = "val/pass@1" if judged else "val/reward"
        else:
            self._monitored = self.monitor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at, self._saved_time = completed_rollouts(trainer), time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        completed = completed_rollouts(trainer)
        due = self.every_n_rollouts > 0 and completed % self.every_n_rollouts == 0
        if self.every_n_minutes is not None:
            late = time.monotonic() - self._saved_time >= 60.0 * self.every_n_minutes
            due |= trainer.strategy.broadcast(late)  # clocks differ, and all must save or none
        if due:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the metric beside a checkpoint, which is made for it if it is one of the best."""
        value = trainer.callback_metrics.get(self._monitored)
        completed = completed_rollouts(trainer)
        if self.folder is None or value is None or completed == 0 or self.keep_best == 0:
            return
        rivals = sorted(metric for n, metric in self._metrics().items() if n != completed)[-self.keep_best :]
        among_best = len(rivals) < self.keep_best or float(value) > rivals[0]
        if trainer.strategy.broadcast(among_best):
            self._save(trainer)
        if trainer.is_global_zero and self._saved_at == completed:
            path = checkpoint_path(self.folder, completed)
            with best_effort(path):
                annotate(path, {self._monitored: float(value)})
            self._tidy()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        problem = self._save(trainer)
        if problem is not None:
            raise CheckpointError(f"the end of the run could not be saved: {problem}.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the last completed rollout of a run that was told to stop, or whose reward or engine failed: then all
        ranks end at the same rollout. After any other error they may not, and nothing is saved."""
        if isinstance(exception, RolloutInterrupted | RewardFailed | EngineDied | OutOfSync):
            self._save(trainer)
        named = TrainingDiverged | PolicyDiverged | RewardFailed
        if isinstance(exception, named) and self._saved_at > 0 and self.folder is not None:
            exception.last_checkpoint = checkpoint_path(self.folder, self._saved_at)

    # --- what is saved ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        set_progress(checkpoint, completed_rollouts(trainer))

    def _save(self, trainer: Trainer) -> str | None:
        """Saves the state after the last completed rollout, unless it is saved. Returns what went wrong, if anything;
        a full disk costs this checkpoint only."""
        completed = completed_rollouts(trainer)
        if self.folder is None or completed == self._saved_at or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        path = checkpoint_path(self.folder, completed)
        if lost := cast(GRPOModule, trainer.lightning_module).finish_rollouts():
            causes = "; ".join(f"rollout {step + 1}: {cause}" for step, cause in lost.items())
            told = f"what was drawn ahead is lost ({causes})"
            rank_zero_warn(f"checkpoint not saved: {told}. --resume goes on from an earlier one, which holds its own.")
            return told
        if trainer.is_global_zero:
            with suppress(OSError):  # what cannot be removed cannot be replaced either: the error of saving is reported
                remove(path)  # left by an interrupted run
        problem: str | None = None
        try:
            trainer.save_checkpoint(path)
        except OSError as error:
            problem = _describe(error, path)
            trainer.strategy.barrier()  # the one that ends save_checkpoint, where processes that write nothing wait
        if trainer.is_global_zero:
            try:
                if problem is None:
                    seal(path, {"rollouts": completed, "world_size": trainer.world_size})
            except OSError as error:
                problem = _describe(error, path)
            if problem is not None:
                with suppress(OSError):  # without its marker it is never taken for a whole one
                    remove(path)
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            rank_zero_warn(f"checkpoint not saved: {problem}. Earlier ones are whole; the next is tried as planned.")
            return problem
        self._saved_at, self._saved_time = completed, time.monotonic()
        if trainer.is_global_zero:
            with best_effort(self.folder / LAST):
                link_atomically(self.folder / LAST, path.name)
            self._tidy()
        return None

    def _metrics(self) -> dict[int, float]:
        """Monitored value per checkpoint that has one."""
        assert self.folder is not None
        facts = [facts_of(path) or {} for path in self.folder.glob(PATTERN)]
        return {fact["rollouts"]: fact[self._monitored] for fact in facts if self._monitored in fact}

    def _tidy(self) -> None:
        """Deletes checkpoints that are neither among the newest nor among the best."""
        assert self.folder is not None
        metrics = self._metrics()
        best = sorted(metrics, key=lambda n: (metrics[n], n), reverse=True)[: self.keep_best]
        paths = sorted(self.folder.glob(PATTERN))
        stay = {*paths[-self.keep :], *(checkpoint_path(self.folder, n) for n in best)}
        for path in paths:
            if path not in stay:
                with best_effort(path):
                    remove(path)
        if best:
            with best_effort(self.folder / BEST):
                link_atomically(self.folder / BEST, checkpoint_path(self.folder, best[0]).name)


def _describe(error: OSError, path: Path) -> str:
    return f"{error.strerror or error} ({path})"
