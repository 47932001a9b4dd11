"""A fit in forked processes, as in a notebook: what it leaves in the process that forked them."""

import multiprocessing
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.training.module import GRPOModule
from tests.training.test_lightning_module import QUIET
from tests.training.test_own_optimizer import ARGUMENTS, tiny_module


def _data() -> RolloutDataModule:
    return RolloutDataModule(ArithmeticPrompts(digits=1), steps=2, prompts_per_step=4, val_prompts=2)


def _fitted(**processes: Any) -> GRPOModule:
    module = tiny_module()
    validated = {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = Trainer(**{**QUIET, **ARGUMENTS, **validated, "use_distributed_sampler": False, **processes})
    trainer.fit(module, _data())
    return module


def test_the_trained_policy_and_its_results_are_there_after_a_fit_in_a_notebook() -> None:
    ours = _fitted(strategy="ddp_notebook", devices=2)
    alone = _fitted(devices=1)
    theirs = alone.require_policy().state_dict()
    for name, weight in ours.require_policy().state_dict().items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-6)
    assert ours.held_out == alone.held_out != {} and ours.unjudged == alone.unjudged
    assert ours.held_out_counts == alone.held_out_counts and ours.decoder == alone.decoder
    (validated,) = Trainer(**QUIET).validate(ours, _data(), verbose=False)
    assert validated["val/reward"] == pytest.approx(ours.held_out["val/reward"].mean)
    assert len(ours.tokenizer) == len(alone.tokenizer)


def test_a_process_that_is_spawned_is_refused_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"^GRPOModule goes to a process that is spawned, as by .* ddp_spawn[^\n]*$"):
        _fitted(strategy="ddp_spawn", devices=2)
    context = multiprocessing.get_context("spawn")
    with pytest.raises(ValueError, match=r"^GRPOModule goes to a process that is spawned"):
        context.Process(target=print, args=(tiny_module(),)).start()
