"""``DemonstrationBatches``: demonstrations that the policy learns from beside its own rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from grpo_pl.data.demonstrations import Demonstration, draw_in_passes, read_demonstrations
from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.collective import Collective
from grpo_pl.functional.losses import demonstration_losses
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.training.cold_start import ColdStart, Stage
from grpo_pl.training.sft import Example, demonstration_logprobs, tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class DemonstrationBatches:
    """Demonstrations for ``algorithm.demonstration_coef``; each optimiser step has a batch that follows from its number
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

    def check(self) -> None:
        """Refuses a file that is not there, before the run starts."""
        if self.file is not None and not Path(self.file).is_file():
            raise ValueError(f"model.demonstrations.file: no such file: {self.file}")

    @property
    def shown(self) -> ColdStart:
        """A cold start that shows the same demonstrations."""
        return ColdStart(steps=1, batch_size=self.batch_size, lr=1.0, seed=self.seed, demonstrations=self.file)

    def examples(
        self, number: int, source: PromptSource, dialogue: Dialogue, stage: Stage | None = None
    ) -> list[Example]:
        """The demonstrations of optimiser step ``number``, counted from the start of the run."""
        if self.file is None:
            chosen = self.shown.from_source(source, stage, number)
        else:
            chosen = draw_in_passes(self._read, count=self.batch_size, seed=self.seed, step=number)
        return tokenized(chosen, dialogue)

    @cached_property
    def _read(self) -> list[Demonstration]:
        assert self.file is not None
        return read_demonstrations(self.file)


@dataclass(frozen=True, kw_only=True)
class Demonstrated:
    """The demonstrations of one optimiser step, the same on every process."""

    examples: Sequence[Example]
    share: float
    """μ, their part of the loss."""

    def parts(self, budget: int, collective: Collective) -> list[list[Example]]:
        """This process's demonstrations, cut into micro-batches of at most ``budget`` tokens, padding included."""
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

    def loss(
        self, model: PreTrainedModel, part: Sequence[Example], algorithm: GRPOAlgorithm, *, pad_token_id: int
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """A micro-batch's share of the loss of demonstrations: Σ over its tokens / number of tokens in all of them."""
        logprobs, written = demonstration_logprobs(model, part, pad_token_id=pad_token_id)
        losses = demonstration_losses(logprobs, weighting=algorithm.demonstration_weighting)
        total = sum(sum(example.written) for example in self.examples)
        nll = -(logprobs.detach() * written).sum()
        return (losses * written).sum() / total, {"demonstration/nll": (nll, written.sum())}
