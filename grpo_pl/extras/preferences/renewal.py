"""``RenewRewardModel``: goes on training the model of a `ModelReward` during RL, on fresh pairs of completions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.data.demonstrations import draw_in_passes
from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.judges.model import ModelReward
from grpo_pl.extras.preferences.loss import agreements, bradley_terry_loss
from grpo_pl.extras.preferences.pairs import Preference, read_preferences
from grpo_pl.extras.preferences.reward_model import pair_scores, save_classifier
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.functional.estimates import wilson_interval
from grpo_pl.functional.sampling import row_key
from grpo_pl.rewards.base import Reward, needs_of
from grpo_pl.rewards.batch import score_one
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization, TrainingDiverged
from grpo_pl.training.stopwatch import stopwatch

HELD_OUT_EVERY = 4
"""One fresh pair in this many is never trained on."""
FEWEST = 20
"""Held-out pairs that are enough to warn of."""


class RenewRewardModel(StepCallback):
    """Every so many rollouts, trains the model of a reward on pairs that are new since the last time.

    With ``judge``, the pairs are completions 2i and 2i + 1 of each group of the rollout, of which the judge gives one a
    higher value; with ``preferences``, the rows that a file has got meanwhile. One pair in four is held out, and the
    newest ``window`` of those say how often the reward model agrees with the preference before it is trained: if the
    95 % interval of that share lies below ``warn_below``, a warning says so once. All processes train on the same pairs
    of all of them, in float32, so that their models stay equal. Weights, optimiser, and held-out pairs are part of
    checkpoints; ``Trainer.validate``, ``test`` and ``predict`` with a checkpoint score with its weights. At the end of
    the run the folder ``reward_model`` in the run's folder holds the renewed model. A loss or gradient that is not
    finite ends the run by `TrainingDiverged`.

    Metrics of a rollout with a renewal: ``reward_model/agreement`` and ``reward_model/agreement_low`` (the lower end of
    its interval) on held-out pairs, ``reward_model/loss`` over its steps, ``reward_model/pairs`` that are new. For a
    reward with another name than ``model`` folder and metrics begin with ``reward_NAME``: several can be renewed.

    Args:
        reward: name of the `ModelReward` in ``model.rewards``.
        every: rollouts between two renewals.
        judge: a reward, such as ``JudgeReward``: the completion that it values higher is preferred.
        preferences: instead, a JSON Lines file with ``prompt``, ``chosen`` and ``rejected`` that grows during the run;
            a last line without its newline waits for the next renewal.
        steps: optimiser steps of a renewal.
        pairs_per_step: pairs of a step.
        lr: AdamW's learning rate.
        window: held-out pairs that count.
        warn_below: share of held-out pairs below which a warning comes.
    """

    def __init__(
        self,
        reward: str = "model",
        every: int = 10,
        judge: Reward | None = None,
        preferences: str | None = None,
        steps: int = 10,
        pairs_per_step: int = 32,
        lr: float = 1e-4,
        window: int = 200,
        warn_below: float = 0.7,
    ) -> None:
        super().__init__()
        check_at_least(1, "RenewRewardModel", every=every, steps=steps, pairs_per_step=pairs_per_step, window=window)
        if (judge is None) == (preferences is None):
            raise ValueError("RenewRewardModel: give one of judge and preferences, which decide the fresh pairs.")
        if preferences is not None and not Path(preferences).is_file():
            raise ValueError(f"RenewRewardModel.preferences: no such file: {preferences}")
        self.reward, self.every, self.judge, self.preferences = reward, every, judge, preferences
        self.steps, self.pairs_per_step, self.window, self.warn_below = steps, pairs_per_step, window, warn_below
        self.optimization = Optimization(lr=lr)
        self._optimizer: torch.optim.Optimizer | None = None
        self._held_out: list[Preference] = []
        self._rows = 0  # of the file, that were used
        self._renewals = 0
        self._warned = False
        self._restored: dict[str, Any] | None = None  # tensors of a checkpoint, as long as nobody has taken them

    # --- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._reward_of(cast(GRPOModule, pl_module))
        if stage == "fit" and self.judge is not None:
            self.judge.check()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scores with the weights of the checkpoint that ``validate``, ``test`` or ``predict`` was given."""
        if self._restored is not None:
            self._restored_model(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = self._restored_model(pl_module)
        self._optimizer = self.optimization.build(model.parameters())
        if self._restored is not None:
            self._optimizer.load_state_dict(self._restored["optimizer"])
            self._restored = None
        self._model = model

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        if (experience.samples.step + 1) % self.every:
            return {}
        module, seconds = cast(GRPOModule, pl_module), dict[str, float]()
        with stopwatch(seconds, self._prefix):
            fresh = self._fresh_pairs(experience, module)
            found = self._renew(self._reward_of(module), fresh, seed=module.seed)
        return {
            **{f"{self._prefix}/{name}": value for name, value in found.items()},
            f"time/{self._prefix}": seconds[self._prefix],
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model, tokenizer = self._reward_of(cast(GRPOModule, pl_module)).loaded
        folder = Path(trainer.default_root_dir) / self._prefix
        save_classifier(model.config, model.state_dict(), tokenizer, folder, trainer.is_global_zero)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.judge is not None:
            self.judge.close()

    @property
    def state_key(self) -> str:
        return f"RenewRewardModel: {self.reward}"

    def state_dict(self) -> dict[str, Any]:
        tensors = self._restored
        if self._optimizer is not None:
            weights = {name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()}
            tensors = {"weights": weights, "optimizer": self._optimizer.state_dict()}
        pairs = [list(pair) for pair in self._held_out]
        counts = {"rows": self._rows, "renewals": self._renewals, "warned": self._warned}
        return {"tensors": tensors, "held_out": pairs, **counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored, self._warned = state_dict["tensors"], state_dict["warned"]
        self._held_out = [Preference(*pair) for pair in state_dict["held_out"]]
        self._rows, self._renewals = state_dict["rows"], state_dict["renewals"]

    # --- a renewal --------------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return f"reward_{self.reward}"

    def _restored_model(self, module: LightningModule) -> Any:
        """The reward's model in float32, in which small updates are not lost, with the weights of a checkpoint."""
        model, _ = self._reward_of(cast(GRPOModule, module)).loaded
        model.float()
        if self._restored is not None:
            model.load_state_dict(self._restored["weights"])
        return model

    def _reward_of(self, module: GRPOModule) -> ModelReward:
        found = next((reward for reward in module.rewards if reward.name == self.reward), None)
        if not isinstance(found, ModelReward):
            names = ", ".join(reward.name for reward in module.rewards if isinstance(reward, ModelReward)) or "none"
            raise ValueError(f"RenewRewardModel.reward is {self.reward!r}; the ModelRewards of this run are: {names}.")
        if found.label != 0:
            raise ValueError(f"RenewRewardModel trains label 0, and {self.reward!r} reads label {found.label}.")
        return found

    def _fresh_pairs(self, experience: Experience, module: GRPOModule) -> list[Preference]:
        """The new pairs of all processes, in the order of the global batch."""
        collective: Collective = module.collective
        if self.preferences is not None:
            file, device = self.preferences, experience.rollout.completion_ids.device

            def read() -> list[Preference]:
                return read_preferences(file, skip=self._rows, may_be_cut_short=True) if collective.rank == 0 else []

            pairs = collective.gather_objects(collective.scored(read, device))[0]
            self._rows += len(pairs)
            return pairs
        assert self.judge is not None
        samples, size = experience.samples, experience.rollout.group_size
        columns = samples.columns(needs_of([self.judge]))
        answers = [problem.answer for problem in samples.per_row]
        judge = self.judge
        scores = collective.scored(
            lambda: score_one(judge, samples.completions, answers, columns), experience.rollout.completion_ids.device
        )
        own = []
        for first in (row + i for row in range(0, len(scores), size) for i in range(0, size - 1, 2)):
            values = [scores[row].value for row in (first, first + 1)]
            if None in values or values[0] == values[1]:
                continue
            texts = samples.completions[first : first + 2]
            better = int(cast(float, values[1]) > cast(float, values[0]))
            own.append(Preference(str(columns["prompt"][first]), texts[better], texts[1 - better]))
        return [pair for part in collective.gather_objects(own) for pair in part]

    def _renew(self, reward: ModelReward, fresh: list[Preference], *, seed: int) -> dict[str, float]:
        """Measures the agreement, then trains on the pairs that are not held out."""
        assert self._optimizer is not None
        self._held_out = [*self._held_out, *fresh[::HELD_OUT_EVERY]][-self.window :]
        training = [pair for i, pair in enumerate(fresh) if i % HELD_OUT_EVERY]
        found = {"pairs": float(len(fresh)), **self._agreement(reward)}
        model, tokenizer = reward.loaded
        losses = []
        order = row_key(seed, "renewal", self._renewals)
        for step in range(self.steps if training else 0):
            batch = draw_in_passes(training, step=step, count=min(self.pairs_per_step, len(training)), seed=order)
            loss = bradley_terry_loss(*pair_scores(model, tokenizer, batch, max_length=reward.max_length)).mean()
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = self.optimization.clip_gradients(model.parameters())
            if not math.isfinite(loss.item()) or not torch.isfinite(norm):  # on all processes alike
                raise TrainingDiverged(
                    f"step {step + 1} of a renewal of the reward model {self.reward!r} has a loss or gradient that is "
                    "not finite. Lower RenewRewardModel.lr."
                )
            self._optimizer.step()
            losses.append(loss.item())
        self._optimizer.zero_grad(set_to_none=True)
        self._renewals += 1
        return found | ({"loss": sum(losses) / len(losses)} if losses else {})

    @torch.no_grad()
    def _agreement(self, reward: ModelReward) -> dict[str, float]:
        if not self._held_out:
            return {}
        model, tokenizer = reward.loaded
        right = 0.0
        for first in range(0, len(self._held_out), self.pairs_per_step):
            some = self._held_out[first : first + self.pairs_per_step]
            right += agreements(*pair_scores(model, tokenizer, some, max_length=reward.max_length)).sum().item()
        count = len(self._held_out)
        low, high = wilson_interval(round(right), count)
        if count >= FEWEST and high < self.warn_below and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"the reward model {self.reward!r} agrees with {right / count:.0%} ({low:.0%} … {high:.0%}) of {count} "
                "held-out pairs: the policy may have learnt to please it. Renew it more often (every), with more "
                "steps, or give it a lower weight."
            )
        return {"agreement": right / count, "agreement_low": low}
