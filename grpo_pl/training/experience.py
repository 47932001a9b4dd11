"""From samples to ``Experience``: advantages over the global batch, and the log-probabilities the loss compares to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.functional.turn_credit import spread_over_tokens
from grpo_pl.objective.algorithm import Advantages, GRPOAlgorithm
from grpo_pl.objective.terms.base import CollectedTokens
from grpo_pl.objective.terms.hooks import prepared
from grpo_pl.policy.lora import adapters_off
from grpo_pl.training.collect import Collected, gathered_values, pass_rates, reward_weights
from grpo_pl.training.frozen_models import Teachers, TeacherScores
from grpo_pl.training.microbatches import Scorer, TokenBudget
from grpo_pl.training.progress import stopwatch
from grpo_pl.training.self_teacher import SelfTeacher
from grpo_pl.types import CUT_OFF, Rollout, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Experience(Collected):
    """One rollout, ready for the update: this rank's rows, and the statistics of the whole batch."""

    statistics: Advantages
    """Over the global batch, (P, G)."""
    lengths: Tensor  # (P, G) tokens that the policy wrote, over the global batch
    values: Tensor  # (R, P, G) float64 over the global batch, NaN where a reward is None
    truncated: Tensor  # (P, G) over the global batch
    first_row: int
    """Index of this rank's first row in the flattened global batch."""
    advantages: Tensor  # (B, T), or (B, 1) where all tokens of a completion share one
    tokens: Mapping[str, Tensor]
    """What else the objective asks for of this rank's tokens, by the names that `GRPOAlgorithm.loss` knows: (B, T)
    each, or (B, 1)."""
    keep: Tensor  # (B,)
    active: Tensor  # (B,)
    turn_advantages: Tensor | None = None  # (B, K), 0 behind an episode's last turn; under turn supervision
    observed: Tensor | None = None  # (P, G) tokens of observations, over the global batch
    teacher: TeacherScores | None = None
    """Scores by teachers, for an objective that distils."""

    @property
    def rollout(self) -> Rollout:
        return self.samples.rollout

    def with_tokens(self, **tokens: Tensor) -> Experience:
        """The same with other tensors of tokens, such as ``old_logprobs``."""
        return replace(self, tokens={**self.tokens, **tokens})

    @property
    def old_logprobs(self) -> Tensor | None:
        """(B, T) of the policy at collection, where the objective asks for them."""
        return self.tokens.get("old_logprobs")

    @property
    def ref_logprobs(self) -> Tensor | None:
        """(B, T) of the reference, where there is one."""
        return self.tokens.get("ref_logprobs")


@dataclass(frozen=True, kw_only=True)
class ExperienceMaker:
    """Reward → advantage: turns scored samples into an ``Experience``; statistics are those of the global batch."""

    algorithm: GRPOAlgorithm
    sampling: SamplingParams
    budget: TokenBudget
    collective: Collective
    longest: int | None = None
    """Most tokens that the policy writes in a completion; None: as ``sampling`` says."""

    def make(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel | None,
        collected: Collected,
        teachers: Teachers | SelfTeacher | None = None,
    ) -> Experience:
        """Scores the samples under policy, reference and teachers where the objective needs it, and assesses them."""
        rollout = collected.samples.rollout
        self.budget.check(rollout, self.collective)
        with stopwatch(collected.seconds, "logprobs"):
            forced = self._teacher_forced(policy, reference, rollout)
        lengths = self._grouped(rollout.action_lengths)
        values = gathered_values(collected.scored, lengths.device, self.collective).unflatten(1, (len(lengths), -1))
        truncated = self._grouped(lengths.new_tensor([r in CUT_OFF for r in rollout.finish_reasons]).bool())
        statistics = self._statistics(collected, forced, values=values, lengths=lengths, truncated=truncated)
        rewards, prompts = collected.scored.rewards, collected.samples.prompts
        rates = collected.rates or pass_rates(prompts, values, rewards, self.collective)
        rows = len(rollout.finish_reasons)
        mine = slice(self.collective.rank * rows, (self.collective.rank + 1) * rows)
        keep, active = (of_all.flatten()[mine] for of_all in (statistics.keep, statistics.active))
        kept = rollout.action_mask & keep.unsqueeze(1)
        advantages = statistics.advantages.flatten()[mine].unsqueeze(1)
        if collected.steps is not None:
            step_values, step_ends = collected.steps
            width = rollout.completion_ids.shape[1]
            advantages = self.algorithm.process_advantages(step_values=step_values, step_ends=step_ends, width=width)
        by_turn = None
        if collected.turns is not None:
            valid = statistics.valid.flatten()[mine]
            by_turn = self.algorithm.turn_advantages(**vars(collected.turns), valid=valid).to(statistics.rewards.dtype)
            advantages = spread_over_tokens(by_turn, rollout.turn_index)
            active = active & (advantages.any(dim=1) | (not self.algorithm.skips_zeros))
        entropy = forced.pop("entropy", None)
        known = {"advantages": advantages} | ({} if entropy is None else {"entropy": entropy})
        step = collected.samples.step
        tokens = dict(forced)  # `ref_logprobs` are logged as `kl` even without such a loss
        if self.algorithm.needs_sampling_logprobs:
            tokens["sampling_logprobs"] = rollout.sampling_logprobs
        if self.algorithm.needs_entropy_mask and entropy is not None:
            tokens["entropy_mask"] = self._entropy_mask(entropy, kept)
        if self.algorithm.needs_covariance:
            tokens["covariance_mask"] = self._covariance_mask(forced["old_logprobs"], advantages, kept, step)
        tokens |= prepared(
            self.algorithm.active_terms,
            CollectedTokens(tokens=tokens | known, kept=kept, step=step, ranks=self.collective),
        )
        taught = self._taught(policy, teachers, collected)
        if taught is not None and taught.logprobs is not None:
            tokens["teacher_logprobs"] = taught.logprobs
        if taught is not None and taught.taught is not None:
            tokens["taught"] = taught.taught.unsqueeze(1)
        if self.algorithm.needs_likely and rollout.top_ids is not None and rollout.top_logprobs is not None:
            tokens["top_ids"], tokens["sampling_top_logprobs"] = rollout.top_ids, rollout.top_logprobs
            tokens["top_is_drawn"] = rollout.top_ids == rollout.completion_ids.unsqueeze(2)
        return Experience(
            **{**vars(collected), "rates": rates},
            statistics=statistics,
            lengths=lengths,
            observed=self._grouped(rollout.observation_mask.sum(dim=1)),
            values=values,
            truncated=truncated,
            first_row=mine.start,
            advantages=advantages,
            tokens=tokens,
            keep=keep,
            active=active,
            turn_advantages=by_turn,
            teacher=taught,
        )

    def _taught(
        self, policy: PreTrainedModel, teachers: Teachers | SelfTeacher | None, collected: Collected
    ) -> TeacherScores | None:
        if teachers is None:
            return None
        with stopwatch(collected.seconds, "teacher"):
            if isinstance(teachers, SelfTeacher):
                return teachers.score(policy, collected, self.algorithm, self._scorer)
            return teachers.score(collected.samples, self.algorithm, self._scorer)

    def _statistics(
        self, collected: Collected, forced: Mapping[str, Tensor], *, values: Tensor, lengths: Tensor, truncated: Tensor
    ) -> Advantages:
        """Advantages over the global batch."""
        algorithm, scored, rollout = self.algorithm, collected.scored, collected.samples.rollout
        mask, extra = rollout.action_mask, dict[str, Tensor]()
        if algorithm.needs_correct:
            extra["correct"] = self._grouped(lengths.new_tensor([bool(c) for c in scored.correct()]).bool())
        if collected.greedy is not None:
            extra["greedy_values"] = gathered_values(collected.greedy, lengths.device, self.collective)
        if algorithm.needs_sequence_kl:
            gap = forced["old_logprobs"] - forced["ref_logprobs"]
            extra["sequence_kl"] = self._grouped((gap * mask).sum(dim=1))
        for name, tensor in forced.items():
            if getattr(algorithm.baseline, f"needs_{name}", False):
                counts = rollout.action_lengths.clamp(min=1) if name == "entropy" else 1
                extra[name] = self._grouped((tensor * mask).sum(dim=1) / counts)
        return algorithm.advantages(
            values=values,
            reward_weights=reward_weights(scored.rewards, values.device),
            lengths=lengths,
            truncated=truncated,
            max_completion_length=self.longest or self.sampling.max_completion_length,
            **extra,
        )

    def _grouped(self, rows: Tensor) -> Tensor:
        """(P, G) over the global batch, of this rank's (B,)."""
        return self.collective.gather_rows(rows).view(-1, self.algorithm.group_size)

    def _entropy_mask(self, entropy: Tensor, kept: Tensor) -> Tensor:
        """(B, T) bool: the tokens of highest entropy over the global batch, which alone carry the policy term."""
        return entropy >= self.algorithm.entropy_threshold(self.collective.gather_values(entropy[kept]))

    def _covariance_mask(self, old: Tensor, advantages: Tensor, kept: Tensor, step: int) -> Tensor:
        """(B, T) bool: this rank's part of the tokens that Clip-Cov or KL-Cov chooses over the global batch."""
        own = (old[kept], advantages.expand_as(kept)[kept])
        logprobs, advantages_of_all = (self.collective.gather_values(values) for values in own)
        chosen = self.algorithm.high_covariance(logprobs, advantages_of_all, step=step)
        mask = torch.zeros_like(kept)
        mask[kept] = self.collective.own_values(chosen, int(kept.sum()), kept.device)
        return mask

    def _teacher_forced(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, rollout: Rollout
    ) -> dict[str, Tensor]:
        """``old_logprobs``, ``ref_logprobs`` and ``entropy`` of a rollout's tokens, (B, T) each, where the objective
        asks for them."""
        forced: dict[str, Tensor] = {}
        rows = torch.arange(len(rollout.prompt_ids), device=rollout.prompt_ids.device)
        if self.algorithm.needs_old_logprobs or self.algorithm.needs_old_entropy:
            old, entropy = self._scorer.logprobs(policy, rollout, rows, entropy=self.algorithm.needs_old_entropy)
            if self.algorithm.needs_old_logprobs:
                forced["old_logprobs"] = old
            if entropy is not None:
                forced["entropy"] = entropy
        if reference is not None:
            with adapters_off(reference):
                forced["ref_logprobs"], _ = self._scorer.logprobs(reference, rollout, rows)
        return forced

    @property
    def _scorer(self) -> Scorer:
        return Scorer(budget=self.budget, collective=self.collective, temperature=self.sampling.temperature)
