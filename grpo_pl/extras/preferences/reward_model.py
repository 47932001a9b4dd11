"""``RewardModelModule``: trains a sequence classifier on pairs of completions, as a LightningModule with its data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.distributed.sharding import whole_state_dict
from grpo_pl.extras.preferences.loss import agreements, bradley_terry_loss
from grpo_pl.extras.preferences.pairs import PairSource, Preference
from grpo_pl.files.writing import staged_folder, system_errors
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.functional.estimates import wilson_interval
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer, model_config, switch_dropout_off
from grpo_pl.policy.pretrained import load_pretrained
from grpo_pl.policy.tokenizer import known_characters, lacking_characters, shown_characters
from grpo_pl.training.beside import Sums
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.step_run import Rows, Split, StepData, StepModule

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


class RewardModelModule(StepModule):
    """Minimises the Bradley–Terry loss on pairs of completions; one training batch is one optimiser step. A step whose
    loss or gradient is not finite is skipped; ``optimization.max_skipped_updates`` of them in a row end the run.

    Args:
        classifier: the model: a ``path``, or ``from_scratch``.
        max_length: most tokens of a prompt and its completion; a longer text loses its beginning.
        optimization: AdamW, learning-rate schedule, clipping; its rollouts are steps.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
    """

    holds = "model"
    model: Any

    def __init__(
        self,
        classifier: PolicyConfig,
        max_length: int = 1024,
        optimization: Optimization = Optimization(lr=1e-4),  # noqa: B008 - frozen
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(optimization, activation_checkpointing)
        check_at_least(1, "model", max_length=max_length)
        if classifier.lora is not None or classifier.quantization is not None:
            raise ValueError("model.classifier is trained whole: set its lora and quantization null.")
        self.classifier_config, self.max_length = classifier, max_length
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(classifier)
        self.tokenizer.padding_side, self.tokenizer.truncation_side = "right", "left"
        self.agreement: tuple[float, float, float] | None = None
        """Share of held-out pairs that the last validation agreed with, and the ends of its 95 % interval."""
        self._counted = torch.zeros(3, dtype=torch.float64)  # agreements, losses, pairs

    def build_model(self, *, weights: bool = True) -> Any:
        return load_classifier(self.classifier_config, self.tokenizer, weights=weights)

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

    def accumulate(self, batch: list[Preference]) -> Sums:
        chosen, rejected = self._scores(batch)
        loss = bradley_terry_loss(chosen, rejected).mean()
        self.manual_backward(loss)
        right = agreements(chosen.detach(), rejected.detach()).sum()
        count = torch.tensor(len(batch), device=self.device)
        return {"loss": (loss.detach() * len(batch), count), "agreement": (right, count)}

    def validation_step(self, batch: Rows[Preference], batch_idx: int) -> None:
        chosen, rejected = self._scores(batch)
        if not batch.filling:
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

    def export(self, folder: Path) -> None:
        """Writes model and tokenizer for `ModelReward` and ``transformers``; all processes call it."""
        assert self.model is not None
        save_classifier(
            self.model.config, whole_state_dict(self.model), self.tokenizer, folder, self.trainer.is_global_zero
        )


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


class PreferenceData(StepData[Preference]):
    """The pairs of each training step, a function of the step alone, and held-out pairs in slices.

    Args:
        pairs: where they come from.
        steps: optimiser steps of a run.
        pairs_per_step: pairs of a step, over all processes.
        val_pairs: held-out pairs that are scored; null takes all.
        seed: names the order of the training pairs, which is another in every pass.
    """

    per_step_option, rows_option = "pairs_per_step", "pairs"

    def __init__(
        self, pairs: PairSource, steps: int = 200, pairs_per_step: int = 32, val_pairs: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(steps, pairs_per_step, seed)
        if val_pairs is not None:
            check_at_least(1, "data", val_pairs=val_pairs)
        self.pairs = pairs
        self.train_pairs, self.val_pairs = pairs.training(), pairs.held_out()[:val_pairs]

    def rows(self, split: Split) -> list[Preference]:
        return self.train_pairs if split == "train" else self.val_pairs

    def digest(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for pair in self.train_pairs:
            digest.update(repr(tuple(pair)).encode())
        return digest.hexdigest()
