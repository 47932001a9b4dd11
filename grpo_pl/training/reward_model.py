"""``RewardModelModule``: trains a sequence classifier on pairs of completions, as a LightningModule with its data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from grpo_pl.data.datamodule import RemainingSteps, Steps
from grpo_pl.data.demonstrations import draw_in_passes
from grpo_pl.data.preferences import PairSource, Preference
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import build_once, shard, whole_state_dict
from grpo_pl.distributed.strategy import FSDP2Strategy, check_strategy
from grpo_pl.files.writing import staged_folder, system_errors
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.functional.estimates import wilson_interval
from grpo_pl.functional.preferences import agreements, bradley_terry_loss
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer, model_config, switch_dropout_off
from grpo_pl.policy.tokenizer import known_characters, lacking_characters, shown_characters
from grpo_pl.rewards.pretrained import load_pretrained
from grpo_pl.training.metrics import StepLog
from grpo_pl.training.optimization import Optimization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_classifier(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, *, weights: bool = True) -> Any:
    """A sequence classifier with one label, from scratch or from a saved model, of which a causal language model gets a
    new head; in training mode with dropout set to zero. Its weights have ``config.dtype``, whatever the files hold.

    Raises:
        ValueError: no such classifier can be built or loaded.
    """
    from transformers import AutoModelForSequenceClassification as Classifier

    options: dict[str, Any] = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    if config.source is not None and weights:
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        model = load_pretrained(Classifier, config.source, head="score", num_labels=1, dtype=dtype, **options)
    else:
        settings = model_config(config, tokenizer, config.source)
        settings.num_labels = 1
        of_config = getattr(settings, "dtype", None) or torch.float32
        dtype = of_config if config.dtype == "auto" else getattr(torch, config.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.init_seed)
            try:
                model = Classifier.from_config(settings, dtype=dtype, **options)
            except Exception as error:  # of transformers, whose message names all models that there are
                why = " ".join(str(error).split())[:120]
                raise ValueError(f"no {settings.model_type} model scores texts: model.classifier: {why}") from error
    model.config.pad_token_id = tokenizer.pad_token_id  # by which decoders find the last token
    switch_dropout_off(model)
    return model.train()


def pair_scores(
    model: Any, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Preference], *, max_length: int
) -> tuple[Tensor, Tensor]:
    """Scores of the preferred and of the other completions in one forward pass, (N,) float32 each: the first logit of
    each text, cut at the left and tokenized as a `ModelReward` does."""
    texts = [*(pair.prompt + pair.chosen for pair in pairs), *(pair.prompt + pair.rejected for pair in pairs)]
    texts = [text.encode(errors="replace").decode() for text in texts]  # lone surrogates
    batch = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    names = [name for name in tokenizer.model_input_names if name in batch]
    logits: Tensor = model(**{name: batch[name].to(model.device) for name in names}).logits
    chosen, rejected = logits[:, 0].float().chunk(2)
    return chosen, rejected


class RewardModelModule(LightningModule):
    """Minimises the Bradley–Terry loss on pairs of completions; one training batch is one optimiser step. A step whose
    loss or gradient is not finite is skipped; ``optimization.max_skipped_updates`` of them in a row end the run.

    Args:
        classifier: the model: a ``path``, or ``from_scratch``.
        max_length: most tokens of a prompt and its completion; a longer text loses its beginning.
        optimization: AdamW, learning-rate schedule, clipping; its rollouts are steps.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        classifier: PolicyConfig,
        max_length: int = 1024,
        optimization: Optimization = Optimization(lr=1e-4),  # noqa: B008 - frozen
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, "model", max_length=max_length)
        if classifier.lora is not None or classifier.quantization is not None:
            raise ValueError("model.classifier is trained whole: set its lora and quantization null.")
        self.automatic_optimization = False
        self.classifier_config, self.max_length, self.optimization = classifier, max_length, optimization
        self.activation_checkpointing = activation_checkpointing
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(classifier)
        self.tokenizer.padding_side, self.tokenizer.truncation_side = "right", "left"
        self.model: Any = None
        self.agreement: tuple[float, float, float] | None = None
        """Share of held-out pairs that the last validation agreed with, and the ends of its 95 % interval."""
        self._counted = torch.zeros(3, dtype=torch.float64)  # agreements, losses, pairs
        self._step_log = StepLog((), ())

    # --- building ---------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        if self.model is not None:
            return
        build = partial(load_classifier, self.classifier_config, self.tokenizer)
        strategy = self.trainer.strategy
        check_strategy(strategy)
        self.model = build_once(build) if isinstance(strategy, FSDP2Strategy) else build()
        if self.activation_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if isinstance(strategy, FSDP2Strategy):
            shard(self.model, strategy.sharding)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimization.build(self.parameters())

    def check(self, data: PreferenceData) -> None:
        """Refuses what would fail after the start: pairs with characters that the tokenizer lacks, a bad model."""
        known = known_characters(self.tokenizer)
        if known is not None:
            tags = self.tokenizer.get_added_vocab()
            texts = ("".join(pair) for pair in [*data.train_pairs, *data.val_pairs])
            if lacking := sorted(set().union(*(lacking_characters(text, known, tags) for text in texts))):
                raise ValueError(
                    f"the vocabulary lacks {shown_characters(lacking)}, which pairs hold: add them to "
                    "model.classifier.characters."
                )
        if self.model is None:
            load_classifier(self.classifier_config, self.tokenizer)

    # --- training ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: list[Preference], batch_idx: int) -> None:
        step, total = self._data.completed_rollouts, self._data.steps
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        self.optimization.configure(optimizer, rollout=step, total=total)
        chosen, rejected = self._scores(batch)
        loss = bradley_terry_loss(chosen, rejected).mean()
        optimizer.zero_grad(set_to_none=True)
        self.manual_backward(loss)
        norm = self.optimization.clip_gradients(self.parameters())
        right = agreements(chosen.detach(), rejected.detach()).sum()
        count = torch.tensor(len(batch), device=self.device)
        found = self.collective.ratios({"loss": (loss.detach() * len(batch), count), "agreement": (right, count)})
        taken = bool(torch.isfinite(norm)) and math.isfinite(found["loss"])  # the same on all processes
        if taken:
            optimizer.step()
        for logger in self.loggers:
            rate = self.optimization.lr_at(step, total)
            logger.log_metrics({**found, "grad_norm": float(norm), "lr": rate}, step=step + 1)
        self._step_log.check_divergence([taken], self.optimization.max_skipped_updates)
        self._data.completed_rollouts += 1

    def validation_step(self, batch: list[Preference], batch_idx: int) -> None:
        if batch:
            chosen, rejected = self._scores(batch)
            right, loss = agreements(chosen, rejected).sum(), bradley_terry_loss(chosen, rejected).double().sum()
            self._counted += torch.tensor([right, loss, len(batch)], dtype=torch.float64)

    def on_validation_epoch_end(self) -> None:
        right, loss, count = self.collective.sum(self._counted.to(self.device)).tolist()
        self._counted.zero_()
        self.agreement = (right / count, *wilson_interval(round(right), int(count)))
        names = ("val/agreement", "val/agreement_low", "val/agreement_high")
        self.log("step", float(self._data.completed_rollouts), on_epoch=True)
        self.log_dict({**dict(zip(names, self.agreement, strict=True)), "val/loss": loss / count}, on_epoch=True)

    def _scores(self, batch: list[Preference]) -> tuple[Tensor, Tensor]:
        return pair_scores(self.model, self.tokenizer, batch, max_length=self.max_length)

    # --- checkpoints and export -------------------------------------------------------------------------------------

    def finish_rollouts(self) -> dict[int, str]:
        """Nothing is drawn ahead; for `RolloutCheckpoint`."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= self._step_log.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._step_log.load_state_dict(checkpoint)

    def export(self, folder: Path) -> None:
        """Writes model and tokenizer for `ModelReward` and ``transformers``; all processes call it."""
        assert self.model is not None
        save_classifier(
            self.model.config, whole_state_dict(self.model), self.tokenizer, folder, self.trainer.is_global_zero
        )

    @property
    def collective(self) -> Collective:
        return Collective(rank=self.trainer.global_rank, world=self.trainer.world_size)

    @property
    def _data(self) -> PreferenceData:
        return cast(PreferenceData, self.trainer.datamodule)  # type: ignore[attr-defined]


def save_classifier(
    config: Any, weights: dict[str, Any], tokenizer: PreTrainedTokenizerBase, folder: Path, is_first: bool
) -> None:
    """Writes a classifier's folder in the type of its weights, in the place of an earlier one; where ``is_first``."""
    from transformers import AutoModelForSequenceClassification

    if not is_first:
        return
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    model.load_state_dict(weights)
    with staged_folder(folder) as staging, system_errors():
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


class PreferenceData(LightningDataModule):
    """The pairs of each training step, a function of the step alone, and held-out pairs in slices.

    Args:
        pairs: where they come from.
        steps: optimiser steps of a run.
        pairs_per_step: pairs of a step, over all processes.
        val_pairs: held-out pairs that are scored; null takes all.
        seed: names the order of the training pairs, which is another in every pass.
    """

    def __init__(
        self, pairs: PairSource, steps: int = 200, pairs_per_step: int = 32, val_pairs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        check_at_least(1, "data", steps=steps, pairs_per_step=pairs_per_step)
        if val_pairs is not None:
            check_at_least(1, "data", val_pairs=val_pairs)
        self.pairs, self.steps, self.pairs_per_step, self.seed = pairs, steps, pairs_per_step, seed
        self.train_pairs, self.val_pairs = pairs.training(), pairs.held_out()[:val_pairs]
        self.completed_rollouts = 0
        """Completed steps; the name is that of all runs, whose checkpoints count them."""

    def batch(self, step: int) -> list[Preference]:
        """This process's pairs of a step."""
        rank, world = self._rank_and_world()
        self.check_shares(world)
        drawn = draw_in_passes(self.train_pairs, step=step, count=self.pairs_per_step, seed=self.seed)
        share = self.pairs_per_step // world
        return drawn[rank * share : (rank + 1) * share]

    def check_shares(self, world: int) -> None:
        """Refuses pairs of a step that ``world`` processes cannot share equally."""
        if self.pairs_per_step % world:
            raise ValueError(
                f"data.pairs_per_step={self.pairs_per_step} does not divide among {world} processes: set a multiple."
            )

    def train_dataloader(self) -> DataLoader[list[Preference]]:
        steps = Steps(self, self.batch)
        return DataLoader(steps, batch_size=None, sampler=RemainingSteps(steps))

    def val_dataloader(self) -> DataLoader[list[Preference]]:
        rank, world = self._rank_and_world()
        own = self.val_pairs[rank::world]
        count = -(-len(self.val_pairs) // (world * self.pairs_per_step))  # the same on all processes
        return DataLoader(
            [own[i * self.pairs_per_step : (i + 1) * self.pairs_per_step] for i in range(count)],  # type: ignore[arg-type]
            batch_size=None,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"completed_rollouts": self.completed_rollouts, "order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.training:
            self.require_unchanged(state_dict)
        self.completed_rollouts = state_dict["completed_rollouts"]

    def require_unchanged(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses to go on from a state with other steps: other training pairs, or another size or order of steps."""
        before: Mapping[str, Any] = state_dict.get("order", {})
        if changed := [name for name, value in self._order.items() if before.get(name, value) != value]:
            raise ValueError(
                f"{' and '.join(f'data.{name}' for name in changed)} changed since this run began: restore what was "
                "there, or begin a run of another --name."
            )

    @cached_property
    def _order(self) -> dict[str, str | int]:
        """All that the pairs of a step depend on, by the field that it comes from."""
        digest = hashlib.blake2b(digest_size=16)
        for pair in self.train_pairs:
            digest.update(repr(tuple(pair)).encode())
        return {"pairs": digest.hexdigest(), "pairs_per_step": self.pairs_per_step, "seed": self.seed}

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
