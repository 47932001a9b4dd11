"""What we lean on inside Lightning's loops and strategies is where it was; a version that moves it fails here first."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy

from grpo_pl.callbacks.lightning_loops import set_progress, validate_now

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Lightning itself saves after three batches."""
    folder = tmp_path_factory.mktemp("boring")
    trainer = Trainer(default_root_dir=folder, max_steps=3, limit_val_batches=0, accelerator="cpu", **QUIET)
    trainer.fit(BoringModel())
    return dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def test_the_counters_of_a_checkpoint_are_those_that_we_set(checkpoint: dict[str, Any]) -> None:
    def names(tree: Any) -> Any:
        return {key: names(value) for key, value in tree.items()} if isinstance(tree, dict) else None

    fit = checkpoint["loops"]["fit_loop"]
    before = {key: names(value) for key, value in fit.items()}
    set_progress(checkpoint, 7)
    assert {key: names(value) for key, value in fit.items()} == before  # nothing new, nothing lost
    assert fit["epoch_loop.batch_progress"]["total"]["ready"] == 7
    assert fit["epoch_loop.state_dict"] == {"_batches_that_stepped": 6}


class AtBothEnds(Callback):
    """Validates where our callback does."""

    validations = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        validate_now(trainer)
        assert trainer.training

    on_train_epoch_end = on_train_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations += 1


def test_validation_can_be_run_from_inside_fit(tmp_path: Path) -> None:
    callback = AtBothEnds()
    trainer = Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        val_check_interval=100,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accelerator="cpu",
        enable_checkpointing=False,
        callbacks=[callback],
        **QUIET,
    )
    trainer.fit(BoringModel())
    assert (callback.validations, trainer.global_step) == (2, 2)


def test_the_strategy_has_the_fields_that_ours_sets() -> None:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=True)
    assert {"_process_group_backend", "_data_parallel_size", "_save_distributed_checkpoint"} <= vars(strategy).keys()
    assert callable(strategy._setup_distributed)
