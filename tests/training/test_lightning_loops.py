"""What we lean on inside Lightning's loops and strategies is where it was; a version that moves it fails here first, or
in ``test_held_out.py``, where validation is run inside of ``fit``."""

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy

from grpo_pl.training.lightning_loops import set_progress

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


def test_the_strategy_has_the_fields_that_ours_sets() -> None:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=True)
    assert {"_process_group_backend", "_data_parallel_size", "_save_distributed_checkpoint"} <= vars(strategy).keys()
    assert callable(strategy._setup_distributed)
