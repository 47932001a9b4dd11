"""From samples to ``Experience``: advantages over the global batch, and the log-probabilities the loss compares to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import Advantages, GRPOAlgorithm
from grpo_pl.objective.terms.base import CollectedTokens
from grpo_pl.objective.terms.hooks import credited, prepared
from grpo_pl.policy.lora import adapters_off
from grpo_pl.training.collect import Collected, gathered_values, pass_rates, reward_weights
from grpo_pl.training.frozen_models import TeacherScores
from grpo_pl.training.microbatches import Scorer, TokenBudget
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.types import CUT_OFF, NO_TURN, Rollout, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.training.frozen_models import Teachers
    from grpo_pl.training.self_teacher import SelfTeacher


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
    observed: Tensor | None = None  # (P, G) tokens of observations, over the global batch
    teacher: TeacherScores = field(default_factory=TeacherScores)
    """Scores by teachers, where the objective asks for them."""

    @property
    def rollout(self) -> Rollout:
        return self.samples.rollout

    def with_tokens(self, **tokens: Tensor) -> Experience:
        """The same with other tensors of tokens, such as ``old_logprobs``."""
        return replace(self, tokens={**self.tokens, **tokens})

    @property
    def turn_advantages(self) -> Tensor | None:
        """(B, K), 0 behind an episode's last turn, where turns are credited."""
        if self.turns is None:
            return None
        index, turns = self.turns.index, self.turns.present.shape[1]
        found = self.advantages.new_zeros(len(index), turns + 1)  # the last column for tokens of no turn
        return found.scatter(1, index.masked_fill(index == NO_TURN, turns), self.advantages.expand_as(index))[:, :turns]

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
        rollout, needs = collected.samples.rollout, self.algorithm.needs
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
        keep, active, valid = (
            of_all.flatten()[mine] for of_all in (statistics.keep, statistics.active, statistics.valid)
        )
        advantages = statistics.advantages.flatten()[mine].unsqueeze(1)
        entropy = forced.pop("entropy", None)
        tokens = dict(forced)  # `ref_logprobs` are logged as `kl` even without such a loss
        if needs.sampling_logprobs:
            tokens["sampling_logprobs"] = rollout.sampling_logprobs
        known = {"advantages": advantages} | ({} if entropy is None else {"entropy": entropy})
        of_rollout = CollectedTokens(
            tokens=tokens | known,
            kept=rollout.action_mask & keep.unsqueeze(1),
            step=collected.samples.step,
            ranks=self.collective,
            grouping=self.algorithm.grouping,
            valid=valid,
            steps=collected.steps,
            turns=collected.turns,
        )
        of_rollout = credited(self.algorithm.active_terms, of_rollout)
        if of_rollout.tokens["advantages"] is not advantages:
            advantages = of_rollout.tokens["advantages"]
            active = active & (advantages.any(dim=1) | (not self.algorithm.skips_zeros))
        tokens |= prepared(self.algorithm.active_terms, of_rollout)
        taught = TeacherScores()
        if teachers is not None:
            with stopwatch(collected.seconds, "teacher"):
                taught = teachers.score(policy, collected, self.algorithm, self._scorer)
        tokens |= taught.tokens()
        if needs.top_logprobs and rollout.top_ids is not None and rollout.top_logprobs is not None:
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
            teacher=taught,
        )

    def _statistics(
        self, collected: Collected, forced: Mapping[str, Tensor], *, values: Tensor, lengths: Tensor, truncated: Tensor
    ) -> Advantages:
        """Advantages over the global batch."""
        algorithm, scored, rollout = self.algorithm, collected.scored, collected.samples.rollout
        mask, extra = rollout.action_mask, dict[str, Tensor]()
        if algorithm.needs.correct:
            extra["correct"] = self._grouped(lengths.new_tensor([bool(c) for c in scored.correct()]).bool())
        if collected.greedy is not None:
            extra["greedy_values"] = gathered_values(collected.greedy, lengths.device, self.collective)
        if algorithm.kl_in_reward:
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

    def _teacher_forced(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, rollout: Rollout
    ) -> dict[str, Tensor]:
        """``old_logprobs``, ``ref_logprobs`` and ``entropy`` of a rollout's tokens, (B, T) each, where the objective
        asks for them."""
        forced: dict[str, Tensor] = {}
        rows = torch.arange(len(rollout.prompt_ids), device=rollout.prompt_ids.device)
        needs = self.algorithm.needs
        if needs.old_logprobs or needs.old_entropy:
            old, entropy = self._scorer.logprobs(policy, rollout, rows, entropy=needs.old_entropy)
            if needs.old_logprobs:
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
