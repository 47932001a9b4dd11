"""Fits in Python that would train nothing, on nothing of ours, or by another seed than one thinks: a line says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.files.checkpoints import checkpoint_path
from grpo_pl.policy.logprobs import tried_mode, use_forward_mode
from grpo_pl.training.module import GRPOModule
from tests.distributed.conftest import fork, join
from tests.gradient_step import SHAPE
from tests.training.test_lightning_module import QUIET
from tests.training.test_own_optimizer import ARGUMENTS, tiny_module

EXACT = "grpo_pl.rewards.ExactReward"


def _data(**more: Any) -> RolloutDataModule:
    return RolloutDataModule(
        ArithmeticPrompts(digits=1), **{"steps": 2, "prompts_per_step": 2, "val_prompts": 2, **more}
    )


def _trainer(**more: Any) -> Trainer:
    return Trainer(**{**QUIET, **ARGUMENTS, **more})


@pytest.mark.parametrize("plain", [False, True], ids=["objects", "plain_values"])
def test_a_checkpoint_of_the_trainer_alone_is_loaded_with_the_policy_and_rewards_given(
    tmp_path: Path, plain: bool
) -> None:
    module, trainer, file = tiny_module(), _trainer(), tmp_path / "own.ckpt"
    trainer.fit(module, _data())
    trainer.save_checkpoint(file)
    with pytest.raises(ValueError, match=r"own\.ckpt holds no settings .* Give the policy and rewards of the run as"):
        GRPOModule.load_from_checkpoint(file, policy=module.policy_config)
    objects = {"policy": module.policy_config, "rewards": module.rewards}
    settings = {"policy": {"from_scratch": {"model_type": "qwen2", **SHAPE}}, "rewards": [{"class_path": EXACT}]}
    loaded = GRPOModule.load_from_checkpoint(file, **(settings if plain else objects), validation={"samples": 3})
    assert loaded.validation.samples == 3 and len(loaded.rewards) == 1 and len(loaded.tokenizer) > 90
    trained = module.require_policy().state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.require_policy().state_dict().items())


def test_a_resumed_fit_scores_in_the_way_that_was_found_at_its_start(tmp_path: Path) -> None:
    """By other weights another way may be found, and ways differ by rounding: here it is one that no trial finds."""

    class Chunked(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            use_forward_mode(pl_module.policy, "chunked")  # type: ignore[arg-type]

    def referring() -> GRPOModule:
        module = tiny_module()
        changes: dict[str, Any] = {"beta": 0.1, "reference": "refreshed", "ref_update_every": 1}
        module.configured_algorithm = module.algorithm = replace(module.algorithm, **changes)
        return module

    saved = RolloutCheckpoint(every_n_rollouts=1, keep=9)
    saved.folder = tmp_path
    _trainer(callbacks=[Chunked(), saved], enable_checkpointing=True).fit(referring(), _data())
    for checkpoint, expected in ((None, "packed"), (checkpoint_path(tmp_path, 1), "chunked")):
        module = referring()
        _trainer().fit(module, _data(), ckpt_path=checkpoint, weights_only=True)
        assert module._scoring.reference is not None
        assert tried_mode(module.policy) == tried_mode(module._scoring.reference.model) == expected


class Named(GRPOModule):
    """A user's own, which names some arguments, one by a type that nobody can look up."""

    def __init__(self, policy, extra: Unknown = None, options: dict[str, int] | None = None, **more: Any) -> None:  # type: ignore # noqa: F821
        super().__init__(policy, **more)
        self.extra, self.options = extra, options


def test_a_subclass_is_loaded_whatever_arguments_its_init_names(tmp_path: Path) -> None:
    module, trainer, file = tiny_module(), _trainer(), tmp_path / "own.ckpt"
    trainer.fit(module, _data(steps=1))
    trainer.save_checkpoint(file)
    settings = {"policy": {"from_scratch": {"model_type": "qwen2", **SHAPE}}, "rewards": [{"class_path": EXACT}]}
    for fields in ({"policy": module.policy_config, "rewards": module.rewards}, settings):
        loaded = Named.load_from_checkpoint(file, **fields, extra=3, options={"a": 1}, sampling={"temperature": 0.5})
        assert (type(loaded), loaded.extra, loaded.options) == (Named, 3, {"a": 1})
        assert (loaded.sampling.temperature, len(loaded.rewards)) == (0.5, 1)
        assert torch.equal(_embeddings(loaded), _embeddings(module))


def _embeddings(module: GRPOModule) -> torch.Tensor:
    return module.require_policy().get_input_embeddings().weight.detach().clone()


def test_a_second_fit_says_why_it_would_train_nothing() -> None:
    module, data, trainer = tiny_module(), _data(), _trainer()
    trainer.fit(module, data)
    with pytest.raises(ValueError, match=r"^this RolloutDataModule has made its 2 rollouts, [^\n]*$"):
        _trainer().fit(module, data)
    with pytest.raises(ValueError, match=r"^this Trainer has made its run, [^\n]*$"):
        trainer.fit(module, _data())
    before = _embeddings(module)
    again = _data()
    _trainer().fit(module, again)
    assert again.completed_rollouts == 2 and not torch.equal(_embeddings(module), before)
    again.steps = 3
    with pytest.warns(UserWarning, match="has made 2 of its 3 rollouts, and this fit makes the others"):
        _trainer().fit(module, again)
    assert again.completed_rollouts == 3


def _sharded(folder: Path) -> None:
    """Fits again and again with sharded weights, and writes what was said."""
    module, data, said = tiny_module(), _data(), list[str]()
    given = {"accelerator": "cpu", "devices": 1, "strategy": FSDP2Strategy(), "enable_checkpointing": True}
    saved = RolloutCheckpoint(every_n_rollouts=1, keep=9)
    saved.folder = folder
    trainer = _trainer(**given, callbacks=[saved])
    trainer.fit(module, data)
    for more, file in ((data, None), (_data(), None), (data, checkpoint_path(folder, 1)), (data, None)):
        try:
            trainer.fit(module, more, ckpt_path=file, weights_only=True)
            said.append(f"{more.completed_rollouts} rollouts")
        except ValueError as error:
            said.append(str(error))
    (folder / "said.json").write_text(json.dumps(said))


def test_a_second_fit_of_sharded_weights_says_why_it_would_train_nothing(tmp_path: Path) -> None:
    ended = join(fork(_sharded, tmp_path, folder=tmp_path, world=1), tmp_path)
    assert ended.status == [0], ended.log(0)
    done, made, resumed, again = json.loads((tmp_path / "said.json").read_text())
    assert done.startswith("this RolloutDataModule has made its 2 rollouts, ") and again == done
    assert made.startswith("this Trainer has made its run, ") and resumed == "2 rollouts"


class AfterOne(Callback):
    """Saves what the first rollout leaves."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *more: Any) -> None:
        if not self.file.exists():
            trainer.save_checkpoint(self.file)


def test_a_fit_from_a_checkpoint_and_one_after_it_are_told_apart(tmp_path: Path) -> None:
    module, data, file = tiny_module(), _data(), tmp_path / "one.ckpt"
    _trainer(callbacks=[AfterOne(file)]).fit(module, data)
    after_two, trainer = _embeddings(module), _trainer()
    trainer.fit(module, data, ckpt_path=file)  # data that is done goes back to the first rollout
    assert data.completed_rollouts == 2 and torch.equal(_embeddings(module), after_two)
    with pytest.raises(ValueError, match=r"^this RolloutDataModule has made its 2 rollouts, [^\n]*$"):
        trainer.fit(module, data)
    with pytest.raises(ValueError, match=r"^this Trainer has made its run, [^\n]*$"):
        trainer.fit(module, _data())


class Own(LightningDataModule):
    """A user's own, of plain rows."""

    def train_dataloader(self) -> DataLoader[str]:
        return DataLoader(["1 + 1", "2 + 2"])  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("run", "given"),
    [
        (lambda trainer, module: trainer.fit(module, datamodule=Own()), "Own"),
        (lambda trainer, module: trainer.fit(module, train_dataloaders=Own().train_dataloader()), "none"),
        (lambda trainer, module: trainer.test(module, dataloaders=Own().train_dataloader()), "none"),
        (lambda trainer, module: trainer.validate(module, datamodule=Own()), "Own"),
        (lambda trainer, module: trainer.predict(module, dataloaders=Own().train_dataloader()), "none"),
    ],
)
def test_other_data_are_refused_in_one_line(run: Callable[[Trainer, GRPOModule], Any], given: str) -> None:
    with pytest.raises(ValueError, match=rf"needs a RolloutDataModule as datamodule, and was given {given}: [^\n]*$"):
        run(_trainer(), tiny_module())


@pytest.mark.parametrize(("called", "seed", "warned"), [(7, 0, True), (7, 7, False), (7, 3, False), (0, 0, False)])
def test_lightnings_seed_is_warned_of_where_ours_was_not_given(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, called: int, seed: int, warned: bool
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "")  # to be put back
    with torch.random.fork_rng():
        seed_everything(called)
    module = tiny_module()
    module.seed = seed
    _trainer().fit(module, _data(steps=1))
    told = [str(warning.message) for warning in recwarn if re.search(r"seed_everything\(7\)", str(warning.message))]
    assert bool(told) == warned and all("GRPOModule(seed=7)" in line for line in told)
