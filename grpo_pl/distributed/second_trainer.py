"""A second Trainer for a fit inside of another one's: on the same processes, with the same strategy and precision."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy

from grpo_pl.distributed.strategy import CheckpointFiles, FSDP2Strategy
from grpo_pl.policy.quiet import CHATTY, UNHELPFUL


def fit_beside(
    first: Trainer,
    module: LightningModule,
    data: LightningDataModule,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | None = None,
    *,
    whole: bool = False,
) -> None:
    """Fits ``module`` once over ``data``, on the processes of ``first``, whose own fit has not begun to train.

    Callbacks and loggers of ``first`` hear nothing of it, and signals have the handlers from before.

    Args:
        checkpoint: of an earlier fit of this kind, to go on from.
        whole: every process holds the whole model, also where ``first`` shards it.
    """
    # Lightning knows by the name "cpu", not by an instance, where bf16-mixed is to compute
    alone = "cpu" if isinstance(first.accelerator, CPUAccelerator) else first.accelerator
    with _quiet():
        second = Trainer(
            strategy=_unused(first.strategy, whole=whole),
            accelerator=alone if first.world_size == 1 else "auto",  # else the strategy's devices tell
            devices=first.num_devices,
            num_nodes=first.num_nodes,
            precision=first.precision,
            max_epochs=1,
            limit_val_batches=0,
            callbacks=[*callbacks, _SignalsAsBefore()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        second.strategy._launcher = None  # the processes are there
        try:
            second.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        except SystemExit as error:  # what Lightning makes of Ctrl-C, which the first Trainer is to hear
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


def _unused(strategy: Strategy, *, whole: bool) -> Strategy:
    """A strategy with the settings of one that is in use."""
    if whole and isinstance(strategy, FSDP2Strategy):
        again: Strategy = DDPStrategy(
            parallel_devices=strategy.parallel_devices, cluster_environment=strategy.cluster_environment
        )
    else:
        again = copy.copy(strategy)
    again._lightning_module = again._model = again._accelerator = again._precision_plugin = None
    again.optimizers, again.lr_scheduler_configs = [], []
    again.checkpoint_io = CheckpointFiles(shared=True)  # other runs may make the same start
    return again


class _SignalsAsBefore(Callback):
    """Puts back the handlers that Lightning replaced: its own for SIGTERM talks to other processes, and can hang."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer._signal_connector.teardown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: Lightning does not tell of the second Trainer what it has told of the first."""
    loggers = [logging.getLogger(name) for name in CHATTY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in UNHELPFUL:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
