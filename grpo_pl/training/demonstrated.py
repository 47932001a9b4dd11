"""``DemonstrationBatches``: demonstrations that the policy learns from beside its own rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.data.demonstrations import Demonstration, draw_in_passes, read_demonstrations
from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import DemonstrationLoss
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.tokenizer import known_characters
from grpo_pl.training.beside import Beside, Sums
from grpo_pl.training.cold_start import MADE_UP, ColdStart, check_characters
from grpo_pl.training.sft import Example, demonstration_logprobs, tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class DemonstrationBatches:
    """Demonstrations for a term that learns from them; each optimiser step has a batch that follows from its number
    alone, so that a resumed run goes on with the same."""

    file: str | None = None
    """JSON Lines file in the forms of ``cold_start.demonstrations``; null asks the prompt source for its own."""
    batch_size: int = 32
    """Demonstrations per optimiser step, over all processes."""
    seed: int = 0
    """Names the demonstrations."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"demonstrations.batch_size must be at least 1, got {self.batch_size}.")

    def check(self, source: PromptSource, dialogue: Dialogue, *, in_environment: bool) -> None:
        """Refuses demonstrations that a run could not learn from, before it starts; of a source, looks at the first.

        Raises:
            ValueError: no such file, a source without demonstrations, episodes without an environment, characters that
                the vocabulary lacks, or a completion that does not begin with the template's prefill.
        """
        if self.file is None:
            shown = list(self.made(source))
        elif not Path(self.file).is_file():
            raise ValueError(f"model.demonstrations.file: no such file: {self.file}")
        else:
            shown = self._read
        if not in_environment and any(each.further for each in shown):
            raise ValueError(f"{self.file} holds episodes of several turns: set model.environment.")
        self._with_known_characters(shown, dialogue)
        if not in_environment:
            tokenized(shown[:MADE_UP], dialogue)

    @property
    def shown(self) -> ColdStart:
        """A cold start that shows the same demonstrations; of a source, the first ones."""
        steps = -(-MADE_UP // self.batch_size)
        return ColdStart(steps=steps, batch_size=self.batch_size, lr=1.0, seed=self.seed, demonstrations=self.file)

    def made(self, source: PromptSource) -> Iterator[Demonstration]:
        """The source's own demonstrations of the first optimiser steps."""
        return islice(chain.from_iterable(self._made(source, step) for step in range(self.shown.size[0])), MADE_UP)

    def of_step(
        self, rollout: int, number: int, *, algorithm: GRPOAlgorithm, source: PromptSource, dialogue: Dialogue
    ) -> Demonstrated:
        """The demonstrations of optimiser step ``number`` of a rollout; none where their share is 0."""
        how = algorithm.needs.demonstrations
        assert how is not None, "refused before"
        share = how.share(rollout)
        number += rollout * algorithm.num_iterations * algorithm.num_minibatches
        return Demonstrated(examples=self.examples(number, source, dialogue) if share else [], share=share, how=how)

    def examples(self, number: int, source: PromptSource, dialogue: Dialogue) -> list[Example]:
        """The demonstrations of optimiser step ``number``, counted from the start of the run."""
        if self.file is None:
            chosen = self._with_known_characters(self._made(source, number), dialogue)
        else:
            chosen = draw_in_passes(self._read, count=self.batch_size, seed=self.seed, step=number)
        return tokenized(chosen, dialogue)

    def _made(self, source: PromptSource, step: int) -> list[Demonstration]:
        return self.shown.from_source(source, None, step, instead="name a file as model.demonstrations.file")

    def _with_known_characters(self, shown: list[Demonstration], dialogue: Dialogue) -> list[Demonstration]:
        return check_characters(shown, known_characters(dialogue.tokenizer), dialogue.tokenizer.get_added_vocab())

    @cached_property
    def _read(self) -> list[Demonstration]:
        assert self.file is not None
        return read_demonstrations(self.file)


@dataclass(frozen=True, kw_only=True)
class Demonstrated(Beside):
    """The demonstrations of one optimiser step."""

    examples: Sequence[Example]
    share: float = field()  # no default: the base class has none to show
    how: DemonstrationLoss

    def metrics(self, like: Tensor) -> Sums:
        share, one = like.new_tensor([self.share, 1.0], dtype=torch.float64)
        return {"demonstration/share": (share, one)}

    @property
    def filler(self) -> Sequence[Example]:
        return self.examples[:1]

    def parts(self, budget: int, collective: Collective) -> list[list[Example]]:
        if self.share == 0:
            return []
        cut: list[list[Example]] = []
        prompt = completion = 0  # the longest ones of the last micro-batch
        for example in self.examples[collective.rank :: collective.world]:
            prompt, completion = max(prompt, len(example.prompt)), max(completion, len(example.completion))
            if cut and (len(cut[-1]) + 1) * (prompt + completion) <= budget:
                cut[-1].append(example)
            else:
                cut.append([example])
                prompt, completion = len(example.prompt), len(example.completion)
        return cut

    def loss(self, model: PreTrainedModel, part: Sequence[Example], *, pad_token_id: int) -> tuple[Tensor, Sums]:
        """Σ over the tokens of a micro-batch / number of tokens in all demonstrations."""
        logprobs, written = demonstration_logprobs(model, part, pad_token_id=pad_token_id)
        losses = self.how.losses(logprobs)
        total = sum(sum(example.written) for example in self.examples)
        nll = -(logprobs.detach() * written).sum()
        return (losses * written).sum() / total, {"demonstration/nll": (nll, written.sum())}
