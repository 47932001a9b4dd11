"""Runs whose training batches are optimiser steps: what reward models and supervised fine-tuning share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from grpo_pl.data.datamodule import RemainingSteps, Steps
from grpo_pl.data.demonstrations import draw_in_passes
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import build_once, shard
from grpo_pl.distributed.strategy import FSDP2Strategy, check_strategy
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.training.beside import Sums
from grpo_pl.training.metrics import StepLog
from grpo_pl.training.optimization import Optimization

T = TypeVar("T")
Split = Literal["train", "val"]


class Rows(list[T]):
    """A process's rows of one batch; ``filling`` marks those of a process that has none left, which count nowhere."""

    def __init__(self, rows: Iterable[T], *, filling: bool = False) -> None:
        super().__init__(rows)
        self.filling = filling


class StepData(LightningDataModule, Generic[T]):
    """The rows of each training step, a function of the step alone, and held-out rows in slices.

    Args:
        steps: optimiser steps of a run.
        per_step: rows of a step, over all processes.
        seed: names the order of the training rows, which is another in every pass.
    """

    per_step_option: str
    """The option that ``per_step`` is given by, without ``data.``."""
    rows_option: str
    """The option that names the training rows, likewise."""

    def __init__(self, steps: int, per_step: int, seed: int) -> None:
        super().__init__()
        check_at_least(1, "data", **{"steps": steps, self.per_step_option: per_step})
        self.steps, self.per_step, self.seed = steps, per_step, seed
        self.completed_rollouts = 0
        """Completed steps; the name is that of all runs, whose checkpoints count them."""
        self.repeated: int | None = None
        """Number of first steps whose rows come again and again (``trainer.overfit_batches``); None for all."""

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Any]:
        """The rows, or what `read` makes rows of."""

    @abstractmethod
    def digest(self) -> str:
        """Of all training rows in their order."""

    def read(self, split: Split, rows: Sequence[Any]) -> list[T]:
        """Some of `rows`."""
        return list(rows)

    def batch(self, step: int) -> Rows[T]:
        """This process's rows of a step."""
        rank, world = self._rank_and_world()
        self.check_shares(world)
        step = step if self.repeated is None else step % self.repeated
        drawn = draw_in_passes(self.rows("train"), step=step, count=self.per_step, seed=self.seed)
        share = self.per_step // world
        return Rows(self.read("train", drawn[rank * share : (rank + 1) * share]))

    def check_shares(self, world: int) -> None:
        """Refuses rows of a step that ``world`` processes cannot share equally."""
        if self.per_step % world:
            raise ValueError(
                f"data.{self.per_step_option}={self.per_step} does not divide among {world} processes: set a multiple."
            )

    def repeat_steps(self, count: int | float) -> None:
        """Has the rows of the first steps come again and again; 0 has every step's own.

        Args:
            count: how many steps, or as a float which share of all: ``trainer.overfit_batches``.
        """
        steps = max(1, round(count * self.steps)) if isinstance(count, float) and count else int(count)
        self.repeated = steps or None

    def train_dataloader(self) -> DataLoader[Rows[T]]:
        steps = Steps(self, self.batch)
        return DataLoader(steps, batch_size=None, sampler=RemainingSteps(steps), collate_fn=_unchanged)

    def val_dataloader(self) -> DataLoader[Rows[T]] | list[Any]:
        rank, world = self._rank_and_world()
        if not len(self.rows("val")):
            return []
        return DataLoader(_Slices(self, rank, world), batch_size=None, collate_fn=_unchanged)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leaves rows as they are: a step makes tensors of them."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"completed_rollouts": self.completed_rollouts, "order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.training:
            self.require_unchanged(state_dict)
        self.completed_rollouts = state_dict["completed_rollouts"]

    def require_unchanged(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses to go on from a state with other steps: other training rows, or another size or order of steps."""
        before: Mapping[str, Any] = state_dict.get("order", {})
        if changed := [name for name, value in self._order.items() if before.get(name, value) != value]:
            raise ValueError(
                f"{' and '.join(f'data.{name}' for name in changed)} changed since this run began: restore what was "
                "there, or begin a run of another --name."
            )

    @property
    def _order(self) -> dict[str, str | int]:
        """All that the rows of a step depend on, by the field that it comes from."""
        return {self.rows_option: self.digest(), self.per_step_option: self.per_step, "seed": self.seed}

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


class _Slices(Dataset[Rows[T]]):
    """The held-out rows of a process, as many slices as on every other one; collectives inside of a forward pass would
    hang otherwise."""

    def __init__(self, data: StepData[T], rank: int, world: int) -> None:
        everyones = data.rows("val")
        self.data, self.own, self.spare = data, everyones[rank::world], everyones[:1]
        self.length = -(-len(everyones) // (world * data.per_step))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Rows[T]:
        size = self.data.per_step
        chosen = self.own[number * size : (number + 1) * size]
        return Rows(self.data.read("val", chosen if len(chosen) else self.spare), filling=not len(chosen))


def _unchanged(batch: T) -> T:
    return batch


class StepModule(LightningModule):
    """Trains a model by a loss of rows; one training batch is one optimiser step. A step whose loss or gradient is not
    finite is skipped; ``optimization.max_skipped_updates`` of them in a row end the run.

    Args:
        optimization: AdamW, learning-rate schedule, clipping; its rollouts are steps.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
    """

    holds: str
    """The attribute with the model, by which its weights are named in checkpoints."""

    def __init__(self, optimization: Optimization, activation_checkpointing: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.optimization, self.activation_checkpointing = optimization, activation_checkpointing
        setattr(self, self.holds, None)
        self._step_log = StepLog((), ())

    @abstractmethod
    def build_model(self, *, weights: bool = True) -> Any:
        """The model that is trained; ``weights`` false builds the architecture only."""

    @abstractmethod
    def accumulate(self, batch: Rows[Any]) -> Sums:
        """Adds up the gradients of a step, which begin at zero; returns its ``loss`` and other metrics of this rank.
        May be called again where memory ended, and then begins with zeroing gradients itself."""

    # --- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._data.repeat_steps(self.trainer.overfit_batches)  # type: ignore[attr-defined]
            if self._data.repeated is not None:  # Lightning would end after them, and validate on as few
                self.trainer.limit_train_batches = self.trainer.limit_val_batches = 1.0

    def configure_model(self) -> None:
        if getattr(self, self.holds) is not None:
            return
        strategy = self.trainer.strategy
        check_strategy(strategy)
        model = build_once(self.build_model) if isinstance(strategy, FSDP2Strategy) else self.build_model()
        if self.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if isinstance(strategy, FSDP2Strategy):
            shard(model, strategy.sharding)
        setattr(self, self.holds, model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimization.build(self.parameters())

    # --- training ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: Rows[Any], batch_idx: int) -> dict[str, Tensor]:
        step, total = self._data.completed_rollouts, self._data.steps
        made = self.optimizers()
        optimizers = cast(list[torch.optim.Optimizer], made if isinstance(made, list) else [made])
        for optimizer in optimizers:
            self.optimization.configure(optimizer, rollout=step, total=total)
            optimizer.zero_grad(set_to_none=True)
        sums = self.accumulate(batch)
        norm = self.optimization.clip_gradients(self.parameters())
        found = self.collective.ratios(sums)
        taken = bool(torch.isfinite(norm)) and math.isfinite(found["loss"])  # the same on all processes
        for optimizer in optimizers if taken else ():
            optimizer.step()
        metrics = {**found, "grad_norm": float(norm), "lr": self.optimization.lr_at(step, total)}
        self.log_dict(metrics, on_step=True, on_epoch=False, logger=False, batch_size=len(batch))
        for logger in self.loggers:
            logger.log_metrics(metrics, step=step + 1)
        self._step_log.check_divergence([taken], self.optimization.max_skipped_updates)
        self._data.completed_rollouts += 1
        return {"loss": torch.tensor(found["loss"])}  # for SpikeDetection and others that expect one

    # --- checkpoints and export -------------------------------------------------------------------------------------

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes model and tokenizer as a folder; all processes call it."""

    def finish_rollouts(self) -> dict[int, str]:
        """Nothing is drawn ahead; for `RolloutCheckpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= self._step_log.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._step_log.load_state_dict(checkpoint)

    @property
    def collective(self) -> Collective:
        return Collective(rank=self.trainer.global_rank, world=self.trainer.world_size)

    @property
    def _data(self) -> StepData[Any]:
        return cast(StepData[Any], self.trainer.datamodule)  # type: ignore[attr-defined]
