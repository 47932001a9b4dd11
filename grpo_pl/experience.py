"""From prompts to ``Experience``: rollout, rewards, advantages, and the log-probabilities that the loss compares to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from grpo_pl.algorithm import Advantages, GRPOAlgorithm
from grpo_pl.collective import Collective
from grpo_pl.data.datamodule import PromptBatch
from grpo_pl.policy.scoring import completion_logprobs
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.scoring import ScoredBatch, score_completions
from grpo_pl.rollout.engine import SamplingParams
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Report(Protocol):
    """Tells whoever watches how far the current stage of a step is."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What one rollout offers to the update: this rank's rows, and the statistics of the whole batch."""

    samples: Samples
    scored: ScoredBatch
    statistics: Advantages
    """Over the global batch, (P, G)."""
    lengths: Tensor  # (P, G) over the global batch
    values: Tensor  # (R, P, G) over the global batch, NaN where a reward is None
    truncated: Tensor  # (P, G) over the global batch
    first_row: int
    """Index of this rank's first row in the flattened global batch."""
    advantages: Tensor  # (B, T), or (B, 1) where all tokens of a completion share one
    keep: Tensor  # (B,)
    active: Tensor  # (B,)
    old_logprobs: Tensor | None  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per stage."""

    @property
    def rollout(self) -> Rollout:
        return self.samples.rollout


@dataclass(frozen=True, kw_only=True)
class ExperienceMaker:
    """Everything that turns a batch of prompts into an :class:`Experience`, except the models."""

    sampler: CompletionSampler
    rewards: Sequence[Reward]
    algorithm: GRPOAlgorithm
    sampling: SamplingParams
    seed: int
    micro_batch_size: int
    collective: Collective
    report: Report
    should_stop: Callable[[], bool] | None = None

    def make(self, policy: PreTrainedModel, reference: PreTrainedModel | None, batch: PromptBatch) -> Experience:
        """Rolls out, scores and assesses this rank's prompts; statistics are those of the global batch."""
        seconds: dict[str, float] = {}
        with stopwatch(seconds, "rollout"):
            samples = self._sample(policy, batch)
        with stopwatch(seconds, "reward"):
            scored = self.score(samples)
        with stopwatch(seconds, "logprobs"):
            old, ref = self._comparison_logprobs(policy, reference, samples.rollout)
        rollout, gather = samples.rollout, self.collective.gather_rows
        groups = (-1, self.algorithm.group_size)
        device = rollout.completion_ids.device
        values = gather(torch.tensor(scored.values(), device=device).T)  # (B, R) over ranks
        lengths = gather(rollout.lengths).view(groups)
        truncated = gather(torch.tensor([r == "length" for r in rollout.finish_reasons], device=device)).view(groups)
        correct = gather(torch.tensor([bool(c) for c in scored.correct()], device=device)).view(groups)
        values = values.T.reshape(len(self.rewards), *lengths.shape)  # (R, P, G)
        statistics = self.algorithm.advantages(
            values=values,
            reward_weights=torch.tensor([reward.weight for reward in self.rewards], device=device),
            lengths=lengths,
            truncated=truncated,
            correct=correct,
            max_completion_length=self.sampling.max_completion_length,
        )
        rows = len(rollout.finish_reasons)
        mine = slice(self.collective.rank * rows, (self.collective.rank + 1) * rows)
        return Experience(
            samples=samples,
            scored=scored,
            statistics=statistics,
            lengths=lengths,
            values=values,
            truncated=truncated,
            first_row=mine.start,
            advantages=statistics.advantages.flatten()[mine].unsqueeze(1),
            keep=statistics.keep.flatten()[mine],
            active=statistics.active.flatten()[mine],
            old_logprobs=old,
            ref_logprobs=ref,
            seconds=seconds,
        )

    def score(self, samples: Samples) -> ScoredBatch:
        """Every reward over every completion. The rewards see texts and gold answers, never a demonstration."""
        self.report("reward", 0, len(samples.completions))
        scored = score_completions(
            self.rewards,
            completions=samples.completions,
            answers=[prompt.answer for prompt in samples.per_row],
            columns=samples.columns(),
        )
        self.report("reward", len(samples.completions), len(samples.completions))
        return scored

    def _sample(self, policy: PreTrainedModel, batch: PromptBatch) -> Samples:
        rows = len(batch.prompts) * self.algorithm.group_size
        return self.sampler.sample(
            policy,
            batch.prompts,
            group_size=self.algorithm.group_size,
            sampling=self.sampling,
            seed=self.seed,
            split="train",
            step=batch.step,
            progress=lambda tokens, finished: self.report("rollout", finished, rows, f"{tokens} tokens"),
            should_stop=self.should_stop,
        )

    def _comparison_logprobs(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, rollout: Rollout
    ) -> tuple[Tensor | None, Tensor | None]:
        """Old and reference log-probabilities, each only if the objective asks for it."""
        old = None if self.algorithm.single_update else self._score_rows(policy, rollout)
        ref = self._score_rows(reference, rollout) if reference is not None else None
        return old, ref

    def _score_rows(self, model: PreTrainedModel, rollout: Rollout) -> Tensor:
        """(B, T) log-probabilities under ``model``, no gradient, a micro-batch at a time."""
        logprobs = torch.zeros_like(rollout.sampling_logprobs)
        with torch.no_grad():
            for rows in torch.arange(len(logprobs), device=logprobs.device).split(self.micro_batch_size):
                part = rollout_rows(rollout, rows)
                width = part["completion_ids"].shape[1]
                logprobs[rows, :width], _ = completion_logprobs(model, **part, temperature=self.sampling.temperature)
        return logprobs


def rollout_rows(rollout: Rollout, rows: Tensor) -> dict[str, Tensor]:
    """The tensors of some rows, cut to the longest prompt and completion among them."""
    prompt_mask, completion_mask = rollout.prompt_mask[rows], rollout.completion_mask[rows]
    prompt = int(prompt_mask.sum(dim=1).max())
    completion = max(1, int(completion_mask.sum(dim=1).max()))
    return {
        "prompt_ids": rollout.prompt_ids[rows][:, -prompt:],
        "prompt_mask": prompt_mask[:, -prompt:],
        "completion_ids": rollout.completion_ids[rows][:, :completion],
        "completion_mask": completion_mask[:, :completion],
    }


@contextmanager
def stopwatch(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the wall time of the block to ``seconds[stage]``; waits for the GPU so that its work is counted."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
