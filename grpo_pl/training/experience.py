"""From samples to ``Experience``: advantages over the global batch, and the log-probabilities the loss compares to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.objective.algorithm import Advantages
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.lora import adapters_off
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import Collected, Collector, FetchPrompts
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.process_supervision import step_tensors
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.types import PromptBatch, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What one rollout offers to the update: this rank's rows, and the statistics of the whole batch."""

    samples: Samples
    scored: ScoredBatch
    attempts: int
    """Rollouts that dynamic sampling added."""
    statistics: Advantages
    """Over the global batch, (P, G)."""
    lengths: Tensor  # (P, G) over the global batch
    values: Tensor  # (R, P, G) float64 over the global batch, NaN where a reward is None
    truncated: Tensor  # (P, G) over the global batch
    first_row: int
    """Index of this rank's first row in the flattened global batch."""
    advantages: Tensor  # (B, T), or (B, 1) where all tokens of a completion share one
    keep: Tensor  # (B,)
    active: Tensor  # (B,)
    old_logprobs: Tensor | None  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    entropy_mask: Tensor | None  # (B, T)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per stage."""

    @property
    def rollout(self) -> Rollout:
        return self.samples.rollout


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Teacher-forced log-probabilities of a rollout, each only if the objective asks for it; (B, T)."""

    old: Tensor | None
    entropy: Tensor | None
    ref: Tensor | None


@dataclass(frozen=True, kw_only=True)
class ExperienceMaker:
    """Turns a batch of prompts into an :class:`Experience`."""

    collector: Collector
    budget: TokenBudget

    def make(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, batch: PromptBatch, fetch: FetchPrompts
    ) -> Experience:
        """Rolls out, scores and assesses this rank's prompts; statistics are those of the global batch."""
        seconds: dict[str, float] = {}
        collected = self.collector.collect(policy, batch, fetch, seconds)
        with stopwatch(seconds, "logprobs"):
            scored = self._teacher_forced(policy, reference, collected.samples.rollout)
        greedy = None
        if self.collector.algorithm.needs_greedy_baseline:
            greedy = self.collector.greedy(policy, collected.samples, seconds)
        return self._assess(collected, scored, greedy, seconds)

    def _assess(
        self, collected: Collected, scored: _Scored, greedy: ScoredBatch | None, seconds: dict[str, float]
    ) -> Experience:
        algorithm, collective = self.collector.algorithm, self.collector.collective
        rollout, gather = collected.samples.rollout, collective.gather_rows
        device, rows = rollout.completion_ids.device, len(rollout.finish_reasons)
        groups = (-1, algorithm.group_size)
        lengths = gather(rollout.lengths).view(groups)
        truncated = gather(torch.tensor([r == "length" for r in rollout.finish_reasons], device=device)).view(groups)
        correct = gather(torch.tensor([bool(c) for c in collected.scored.correct()], device=device)).view(groups)
        values = self._values(collected.scored, device).unflatten(1, groups)  # (R, P, G)
        sequence_kl = None
        if algorithm.needs_sequence_kl and scored.old is not None and scored.ref is not None:
            sequence_kl = gather(((scored.old - scored.ref) * rollout.completion_mask).sum(dim=1)).view(groups)
        statistics = algorithm.advantages(
            values=values,
            reward_weights=self.collector.reward_weights.to(device),
            lengths=lengths,
            truncated=truncated,
            correct=correct,
            greedy_values=None if greedy is None else self._values(greedy, device),
            sequence_kl=sequence_kl,
            max_completion_length=self.collector.sampling.max_completion_length,
        )
        mine = slice(collective.rank * rows, (collective.rank + 1) * rows)
        keep = statistics.keep.flatten()[mine]
        return Experience(
            samples=collected.samples,
            scored=collected.scored,
            attempts=collected.attempts,
            statistics=statistics,
            lengths=lengths,
            values=values,
            truncated=truncated,
            first_row=mine.start,
            advantages=self._token_advantages(collected, statistics.advantages.flatten()[mine]),
            keep=keep,
            active=statistics.active.flatten()[mine],
            old_logprobs=scored.old,
            ref_logprobs=scored.ref,  # logged as `kl` even where the loss has no such term
            entropy_mask=self._entropy_mask(scored.entropy, rollout.completion_mask & keep.unsqueeze(1)),
            seconds=seconds,
        )

    def _token_advantages(self, collected: Collected, outcome: Tensor) -> Tensor:
        """(B, 1), one advantage for all tokens of a completion, or (B, T) under process supervision."""
        algorithm, sampler = self.collector.algorithm, self.collector.sampler
        if not algorithm.needs_step_rewards:
            return outcome.unsqueeze(1)
        values, ends = step_tensors(collected.scored, collected.samples, sampler.template, sampler.tokenizer)
        width = collected.samples.rollout.completion_ids.shape[1]
        return algorithm.process_advantages(step_values=values, step_ends=ends, width=width)

    def _values(self, scored: ScoredBatch, device: torch.device) -> Tensor:
        """(R, rows) float64 over the global batch, NaN where a reward is None."""
        return self.collector.collective.gather_rows(
            torch.tensor(scored.values(), dtype=torch.float64, device=device).T
        ).T

    def _entropy_mask(self, entropy: Tensor | None, kept: Tensor) -> Tensor | None:
        """(B, T) bool: the tokens of highest entropy over the global batch, which alone carry the policy term."""
        if entropy is None:
            return None
        everyone = self.collector.collective.gather_values(entropy[kept])
        return entropy >= self.collector.algorithm.entropy_threshold(everyone)

    def _teacher_forced(self, policy: PreTrainedModel, reference: PreTrainedModel | None, rollout: Rollout) -> _Scored:
        algorithm = self.collector.algorithm
        old = entropy = ref = None
        if algorithm.needs_old_logprobs or algorithm.needs_entropy_mask:
            old, entropy = self._score(policy, rollout, with_entropy=algorithm.needs_entropy_mask)
        if reference is not None:
            with adapters_off(reference):
                ref, _ = self._score(reference, rollout, with_entropy=False)
        return _Scored(old=old if algorithm.needs_old_logprobs else None, entropy=entropy, ref=ref)

    def _score(self, model: PreTrainedModel, rollout: Rollout, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(B, T) log-probabilities under ``model``, no gradient, a micro-batch at a time."""
        run = partial(self._score_rows, model, rollout, with_entropy=with_entropy)
        return self.budget.within_memory(run, rollout, self.collector.collective)

    def _score_rows(
        self, model: PreTrainedModel, rollout: Rollout, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.zeros_like(rollout.sampling_logprobs)
        entropies = torch.zeros_like(logprobs) if with_entropy else None
        with torch.no_grad():
            parts = self.budget.cut(rollout, torch.arange(len(logprobs), device=logprobs.device), model)
            # every rank makes equally many forwards, or collectives inside them would hang: the last part again
            for number in range(self.collector.collective.max(len(parts), logprobs.device)):
                rows = parts[min(number, len(parts) - 1)]
                part = rollout_rows(rollout, rows)
                width = part["completion_ids"].shape[1]
                logprobs[rows, :width], entropy = completion_logprobs(
                    model, **part, temperature=self.collector.sampling.temperature, with_entropy=with_entropy
                )
                if entropies is not None and entropy is not None:
                    entropies[rows, :width] = entropy
        return logprobs, entropies


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
