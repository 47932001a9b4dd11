"""The result of a fit: the policy as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.callbacks.record import plain_fields
from grpo_pl.distributed.sharding import whole_model
from grpo_pl.evaluation.model_card import model_card
from grpo_pl.files.runs import RunFolder
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.training.lightning_loops import completed_rollouts
from grpo_pl.training.module import GRPOModule


class ExportPolicy(Callback):
    """Writes ``folder`` once training has ended, with a model card of the run in whose folder it lies.

    Args:
        folder: where to; replaced if it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewards and environments that an export could not name are refused before the training, not after it."""
        module = cast(GRPOModule, pl_module)
        for reward in module.rewards:
            reward.spec()
        if module.environment is not None:
            module.environment.spec()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(GRPOModule, pl_module)
        model = whole_model(module.require_policy())
        if model is not None:
            run = RunFolder(self.folder.absolute().parent)
            trained = TrainedWith(
                template=module.template,
                rewards=[reward.spec() for reward in module.rewards],
                sampling=module.sampling,
                environment=None if module.environment is None else module.environment.spec(),
                episodes=asdict(module.episodes),
                algorithm=plain_fields(module.configured_algorithm),
                precision=str(trainer.precision),
                decoder=module.decoder or "",
                run={"name": run.path.name, "step": completed_rollouts(trainer)},
            )
            card = model_card(run, name=run.path.name, rewards=trained.rewards)
            export_policy(self.folder, trained, model=model, tokenizer=module.tokenizer, card=card)
