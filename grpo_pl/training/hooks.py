"""``StepCallback``: what a callback can do inside a training step, beside Lightning's own hooks."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.training.experience import Experience


class StepCallback(Callback):
    """A Lightning callback that ``GRPOModule`` also asks from inside a step, while it is among ``trainer.callbacks``.

    Between steps Lightning's own hooks serve: ``on_train_batch_end`` gets the step's ``Experience`` as
    ``outputs["experience"]``. Every process asks its own callbacks, in the order of ``trainer.callbacks``.
    """

    def on_stage_progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """``done`` of ``total`` units of the stage (``rollout``, ``reward``, ``update``, ``validate``) are done; of a
        ``cold start`` before the ``setup`` of the callbacks."""

    def before_update(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> None:
        """The step's rollout is scored and ready for the update; the policy is still the one that was scored."""

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        """More metrics to log for this step; asked after the update."""
        return {}

    def should_stop(self) -> bool:
        """Asked between the tokens of a rollout; once true, the rollout ends by ``RolloutInterrupted``."""
        return False
