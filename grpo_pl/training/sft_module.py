"""``SFTModule``: supervised fine-tuning of a policy on rows of demonstrations, as a LightningModule with its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from grpo_pl.data.demonstration_rows import DemonstrationRows, Judge, Side, SortedRows
from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.distributed.sharding import whole_model
from grpo_pl.distributed.strategy import FSDP2Strategy, joining_gradients
from grpo_pl.environment import text_of
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.loading import (
    PolicyConfig,
    check_weights,
    context_length,
    load_model,
    load_tokenizer,
    model_config,
)
from grpo_pl.policy.logprobs import completion_logprobs, tried_mode, use_forward_mode
from grpo_pl.policy.template import PromptTemplate, takes_tools
from grpo_pl.policy.tokenizer import CHARACTERS, FROM_DATA, known_characters, lacking_characters, shown_characters
from grpo_pl.policy.trained import SETTINGS
from grpo_pl.processes.malloc import keep_freed_memory
from grpo_pl.training.beside import Sums
from grpo_pl.training.defaults import Derived, derive_supervised
from grpo_pl.training.microbatches import TokenBudget, rollout_rows
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.sft import Example, as_rollout, tokenized
from grpo_pl.training.step_run import Rows, StepData, StepModule
from grpo_pl.types import Rollout, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTModule(StepModule):
    """Minimises the negative log-likelihood of demonstrations' completions.

    One training batch is one optimiser step; its loss is the mean over all of its completions' tokens, however they are
    spread over processes and micro-batches. A step whose loss or gradient is not finite is skipped;
    ``optimization.max_skipped_updates`` of them in a row end the run.

    Args:
        policy: the language model to train.
        template: how a prompt becomes what the policy reads.
        sampling: how completions of the trained policy are drawn where nobody says otherwise, as by a server; the
            training draws none.
        optimization: AdamW, learning-rate schedule, clipping; its rollouts are steps. What is null is derived as for a
            cold start.
        max_tokens_per_microbatch: most tokens per forward and backward pass; null finds what fits into memory.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
    """

    holds = "policy"
    policy: Any

    def __init__(
        self,
        policy: PolicyConfig,
        template: PromptTemplate = PromptTemplate(),  # noqa: B008 - frozen
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        optimization: Optimization = Optimization(),  # noqa: B008 - frozen
        max_tokens_per_microbatch: int | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(optimization, activation_checkpointing)
        self.policy_config, self.template, self.sampling = policy, template, sampling
        self.budget = TokenBudget(configured=max_tokens_per_microbatch)
        self.tokenizer: PreTrainedTokenizerBase
        self.settings: dict[str, Any] | None = None
        """Arguments of the module as plain values, for its checkpoints; None for one that is made in Python."""
        self._counted = torch.zeros(2, dtype=torch.float64)  # negative log-likelihood, tokens

    # --- before the start -------------------------------------------------------------------------------------------

    def check(self, data: SFTData) -> list[Derived]:
        """Reads all rows, and refuses what would fail after the start; derives the fields that are null, and says
        which.

        Raises:
            ValueError: a model that cannot be loaded, or rows that cannot be learned from, by file and number.
        """
        if self.policy_config.images:
            raise ValueError("policy.images does not go with `grpo-pl sft`, whose rows are read as text: set it false.")
        if self.policy_config.characters == FROM_DATA:
            self.policy_config = replace(self.policy_config, characters=CHARACTERS + self._further_characters(data))
        self.tokenizer = load_tokenizer(self.policy_config)
        check_weights(self.policy_config)
        self._model_settings = model_config(self.policy_config, self.tokenizer)
        self._known, self._tags = known_characters(self.tokenizer), self.tokenizer.get_added_vocab()
        derived = derive_supervised(self.policy_config, self.optimization, data.steps)
        named = {each.field.rpartition(".")[2]: each.value for each in derived}
        self.optimization = replace(self.optimization, **named)
        data.load(self._faults, self.encoded)
        return derived

    def _further_characters(self, data: SFTData) -> str:
        found = set[str]()
        texts = [self.template.system, self.template.user, self.template.prefill]
        for example in self.template.examples:
            texts += [example.question, example.completion]
        for text in chain(texts, data.texts()):
            found |= lacking_characters(text, found.union(CHARACTERS), self.policy_config.tags)
        return "".join(sorted(found))

    def encoded(self, shown: Sequence[Demonstration]) -> list[Example]:
        """Demonstrations as the tokens of their prompts and completions."""
        return tokenized(shown, Dialogue(template=self.template, tokenizer=self.tokenizer))

    def _faults(self, shown: Sequence[Demonstration]) -> list[str | None]:
        """Why each cannot be learned by this policy; None for one that can."""
        try:
            return [self._fault(each, example) for each, example in zip(shown, self.encoded(shown), strict=True)]
        except ValueError:  # of one among them
            return [self._fault_alone(each) for each in shown]

    def _fault_alone(self, shown: Demonstration) -> str | None:
        try:
            (example,) = self.encoded([shown])
        except ValueError as error:
            return str(error).rstrip(".")
        return self._fault(shown, example)

    def _fault(self, shown: Demonstration, example: Example) -> str | None:
        if self._known is not None:
            text = f"{text_of(shown.question)}{shown.text}"
            if lacking := lacking_characters(text, self._known, self._tags):
                told = shown_characters(sorted(lacking))
                return f"the vocabulary lacks {told}: set model.policy.characters to from_data"
        if shown.tools and not (self.template.through_chat(self.tokenizer) and takes_tools(self.tokenizer)):
            return "it offers tools, and the chat template has no place for them"
        if not example.prompt:
            return "its prompt has no tokens, after which the first one could be predicted"
        length, most = len(example.prompt) + len(example.completion), self.budget.configured
        context, size = context_length(self._model_settings), self._model_settings.get_text_config().vocab_size
        if context is not None and length > context:
            return f"it has {length} tokens, and the model's context has {context}"
        if most is not None and length > most:
            return f"it has {length} tokens, and model.max_tokens_per_microbatch is {most}"
        if (largest := max(*example.prompt, *example.completion)) >= size:
            return f"its token {self.tokenizer.convert_ids_to_tokens(largest)!r} has no embedding in the model"
        return None

    # --- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        self.read_rows()
        super().setup(stage)
        if self.trainer.strategy.root_device.type == "cpu":
            keep_freed_memory()

    def read_rows(self) -> None:
        """Reads and checks the rows, unless the command line has done so, and loads the tokenizer."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SFTData):
            given = "none" if data is None else type(data).__name__
            raise ValueError(f"SFTModule is trained on SFTData as datamodule, and was given {given}.")
        if not data.is_loaded:
            self.check(data)
            for note in data.notes:
                rank_zero_info(note)

    def build_model(self, *, weights: bool = True) -> Any:
        if isinstance(self.trainer.strategy, FSDP2Strategy):
            self.policy_config.check_sharding()
        return load_model(self.policy_config, self.tokenizer, weights=weights)

    def on_fit_start(self) -> None:
        with self.trainer.precision_plugin.forward_context(), torch.enable_grad():  # before the first validation
            self.budget.resolve(self.policy, trained_before=False, collective=self.collective)

    # --- training ---------------------------------------------------------------------------------------------------

    def accumulate(self, batch: Rows[Example]) -> Sums:
        collective, rollout = self.collective, self._rollout(batch)
        own = rollout.action_mask.sum() * (not batch.filling)
        total = collective.sum(own)  # of all processes
        rows = torch.arange(len(batch), device=self.device)

        def run() -> Tensor:
            self.zero_grad(set_to_none=True)
            parts = list(self.budget.rounds(rollout, rows, self.policy, collective))
            summed = torch.zeros((), device=self.device, dtype=torch.float64)
            for number, (part, counts) in enumerate(parts, start=1):
                loss = float(counts and not batch.filling) * self._nll(rollout, part) / total
                with joining_gradients(self.trainer.strategy, self.policy, last=number == len(parts)):
                    self.manual_backward(loss * collective.world)  # gradients are averaged over processes
                summed += loss.detach().double()
            return summed

        loss = self.budget.within_memory(run, rollout, collective)
        once = torch.tensor(float(collective.rank == 0), device=self.device)
        return {"loss": (loss, once), "tokens": (own, once)}

    def _rollout(self, batch: Sequence[Example]) -> Rollout:
        return as_rollout(batch, pad_token_id=cast(int, self.tokenizer.pad_token_id)).to(self.device)

    def _nll(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """−Σ log π(token) over the tokens of some rows that the policy is to write; a scalar."""
        part: dict[str, Any] = rollout_rows(rollout, rows)
        logprobs, _ = completion_logprobs(self.policy, **part, temperature=1.0)
        return -(logprobs * cast(Tensor, part["action_mask"])).sum()

    def validation_step(self, batch: Rows[Example], batch_idx: int) -> None:
        rollout = self._rollout(batch)
        rows = torch.arange(len(batch), device=self.device)
        for part, counts in self.budget.rounds(rollout, rows, self.policy, self.collective):
            nll = self._nll(rollout, part)
            if counts and not batch.filling:
                self._counted += torch.stack([nll, rollout.action_mask[part].sum()]).double().cpu()

    def on_validation_epoch_end(self) -> None:
        nll, tokens = self.collective.sum(self._counted.to(self.device)).tolist()
        self._counted.zero_()
        loss = nll / tokens
        self.log("step", float(self._data.completed_rollouts), on_epoch=True)
        self.log_dict({"val/loss": loss, "val/likelihood": math.exp(-loss)}, on_epoch=True)

    # --- checkpoints and export -------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint |= {"token_budget": self.budget.state_dict(), "characters": self.policy_config.characters}
        checkpoint["forward_mode"] = tried_mode(self.policy)
        if self.settings is not None:
            checkpoint[SETTINGS] = self.settings

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if checkpoint["characters"] != self.policy_config.characters:
            raise ValueError(
                "the checkpoint was trained with other policy.characters: give those of the config.yaml of its run."
            )
        use_forward_mode(self.policy, checkpoint.get("forward_mode"))
        self.budget.load_state_dict(checkpoint["token_budget"])

    def export(self, folder: Path, card: str = "") -> None:
        """Writes what ``grpo-pl serve`` and ``model.policy.path`` read, adapters merged; all processes call it.

        Args:
            card: text of ``README.md``; none is written if it is empty.
        """
        model = whole_model(self.policy)
        if model is not None:
            trained = TrainedWith(
                template=self.template,
                rewards=[],
                sampling=self.sampling,
                precision=str(self.trainer.precision),
            )
            export_policy(folder, trained, model=model, tokenizer=self.tokenizer, card=card)


class SFTData(StepData[Example]):
    """The demonstrations of each training step, a function of the step alone, and held-out ones in slices.

    Args:
        rows: where they come from.
        steps: optimiser steps of a run.
        rows_per_step: demonstrations of a step, over all processes.
        val_rows: held-out demonstrations that the loss is measured on; null takes all.
        seed: names the order of the training rows, which is another in every pass.
    """

    per_step_option, rows_option = "rows_per_step", "rows"

    def __init__(
        self,
        rows: DemonstrationRows,
        steps: int = 200,
        rows_per_step: int = 16,
        val_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(steps, rows_per_step, seed)
        if val_rows is not None:
            check_at_least(1, "data", val_rows=val_rows)
        self.source, self.val_rows = rows, val_rows
        self._sorted: SortedRows | None = None
        self._encode: Callable[[Sequence[Demonstration]], list[Example]]

    def load(self, judge: Judge, encode: Callable[[Sequence[Demonstration]], list[Example]]) -> None:
        """Reads every row once, as `DemonstrationRows.sort` does; the rows of a step are then read as ``encode`` makes
        them."""
        self._sorted, self._encode = self.source.sort(judge), encode

    @property
    def is_loaded(self) -> bool:
        return self._sorted is not None

    @property
    def notes(self) -> Sequence[str]:
        """Lines to print about rows that were left out."""
        return self._found.notes

    def texts(self) -> Iterator[str]:
        """What all rows hold that are demonstrations at all."""
        return self.source.texts()

    def rows(self, split: Side) -> Sequence[int]:
        numbers = self._found.numbers[split]
        return numbers[: self.val_rows] if split == "val" else numbers

    def read(self, split: Side, rows: Sequence[int]) -> list[Example]:
        return self._encode(self.source.read(split, rows))

    def digest(self) -> str:
        return self._found.digest

    @property
    def _found(self) -> SortedRows:
        assert self._sorted is not None, "SFTModule loads its data"
        return self._sorted
