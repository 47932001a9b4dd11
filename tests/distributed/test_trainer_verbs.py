"""``Trainer.test`` and ``Trainer.predict`` in two processes answer as one does, and a fit may follow a validation."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

from grpo_pl.cli.run_folder import TRAINER_DEFAULTS
from grpo_pl.config.objects import build
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.strategy import CheckpointFiles, FSDP2Strategy
from grpo_pl.training.module import GRPOModule
from tests.distributed.conftest import Calls

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def _trainer(world: int, strategy: str) -> Trainer:
    chosen: Any = FSDP2Strategy() if strategy == "fsdp" else strategy
    plugins = [] if strategy == "fsdp" else [CheckpointFiles()]
    arguments = {**TRAINER_DEFAULTS, **QUIET, "accelerator": "cpu", "devices": world, "plugins": plugins}
    return Trainer(strategy=chosen, **arguments)


def _parts(run: Path) -> tuple[GRPOModule, RolloutDataModule]:
    config = yaml.safe_load((run / "config.yaml").read_text())
    return build(GRPOModule, config["model"], "model"), build(RolloutDataModule, config["data"], "data")


def ask(run: Path, cache: Path, out: Path, world: int, strategy: str) -> None:
    """Tests and predicts with the run's last checkpoint; each process writes what it found."""
    os.environ["GRPO_PL_CACHE"] = str(cache)
    module, data = _parts(run)
    checkpoint = str((run / "checkpoints/last.ckpt").resolve())
    trainer = _trainer(world, strategy)
    (tested,) = trainer.test(module, data, ckpt_path=checkpoint, verbose=False, weights_only=True)
    (rows,) = trainer.predict(module, data, ckpt_path=checkpoint, weights_only=True)
    (out / f"{strategy}{trainer.global_rank}.json").write_text(json.dumps({"tested": tested, "rows": rows}))


def validate_and_fit(run: Path, cache: Path, out: Path, world: int, strategy: str) -> None:
    """Trains with a reference after a validation has sharded the policy."""
    os.environ["GRPO_PL_CACHE"] = str(cache)
    module, data = _parts(run)
    assert module.algorithm.needs.ref_logprobs
    trainer = _trainer(world, strategy)
    trainer.validate(module, data, verbose=False)
    trainer.limit_train_batches = 2
    trainer.fit(module, data)
    (out / f"{strategy}-kl{trainer.global_rank}.json").write_text(json.dumps(float(trainer.callback_metrics["kl"])))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_test_and_predict_as_one_does(
    completed: Calls, in_processes: Calls, cache: Path, tmp_path: Path, strategy: str
) -> None:
    run = completed("single").path
    in_processes(ask, run, cache, tmp_path, 1, "auto", world=1)
    in_processes(ask, run, cache, tmp_path, 2, strategy)
    alone = json.loads((tmp_path / "auto0.json").read_text())
    both = [json.loads((tmp_path / f"{strategy}{rank}.json").read_text()) for rank in range(2)]
    assert both[0]["tested"] == pytest.approx(alone["tested"]) and "test/pass@1" in alone["tested"]
    assert [len(part["rows"]) for part in both] == [3, 2]  # of five held-out problems
    assert both[0]["rows"] + both[1]["rows"] == alone["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["five_rollouts", "seeing"])
def test_a_fit_after_a_validation_has_a_reference_of_the_sharded_policy(
    request: pytest.FixtureRequest, completed: Calls, in_processes: Calls, cache: Path, tmp_path: Path, config: str
) -> None:
    run = completed("single", request.getfixturevalue(config)).path
    in_processes(validate_and_fit, run, cache, tmp_path, 1, "auto", world=1)
    in_processes(validate_and_fit, run, cache, tmp_path, 2, "fsdp")
    names = ("auto-kl0", "fsdp-kl0", "fsdp-kl1")
    alone, *both = (json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    assert alone > 0 and both == pytest.approx([alone, alone], rel=1e-4)
