"""``GRPOAlgorithm``: the training objective as one frozen dataclass, each field one orthogonal choice.

    L = Σ over tokens of w · ( −surrogate(ratio, A) + beta · KL − entropy_coef · H )

and what its ``terms`` add. The pipeline asks ``needs`` what it has to compute. Per rollout it calls ``advantages`` on
the rewards of the global batch; per micro-batch, ``token_weights`` and ``loss``. A subclass may override any of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from grpo_pl.functional import advantages as adv
from grpo_pl.functional import kl, losses
from grpo_pl.functional.advantages import Advantages, Baseline
from grpo_pl.functional.losses import LossOutput
from grpo_pl.functional.trust_region import LikelyTokens
from grpo_pl.objective.checks import check_objective
from grpo_pl.objective.custom import AdvantageEstimator, RewardedGroups, SurrogateObjective, TokenBatch
from grpo_pl.objective.fields import WITHOUT_RATIO, Objective
from grpo_pl.objective.policy_term import clip_stats, sampler_weight, surrogate
from grpo_pl.objective.terms.base import Grouping
from grpo_pl.objective.terms.hooks import with_advantages, with_extras, with_losses, with_masks, with_policy_losses

_HOOKS_OF_TERMS = (
    *("process_advantages", "turn_advantages", "entropy_threshold", "high_covariance", "demonstration_share"),
)
"""Methods of 0.3 that a subclass might have overridden."""
__all__ = ["Advantages", "GRPOAlgorithm", "LossOutput"]


@dataclass(frozen=True, kw_only=True)
class GRPOAlgorithm(Objective):
    """GRPO and its relatives; presets are in ``configs/algorithm``, the defaults are ``grpo``.

    Raises:
        ValueError: choices that contradict each other, or a value out of its range.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        gone = [name for name in vars(cls) if name in _HOOKS_OF_TERMS or name.startswith("needs_")]
        if gone:
            raise ValueError(
                f"{cls.__name__} defines {gone[0]}, which nothing asks for any more: see `needs`, and the terms of the "
                "objective (docs/extending.md)."
            )

    def __post_init__(self) -> None:
        check_objective(self)

    def for_stale_samples(self, stale: bool) -> Self:
        """The objective with its own choice of ``mismatch``, if that is left to it, where samples are from older
        weights, or are not."""
        if self.mismatch != "auto":
            return self
        if not stale or self.bounds_divergence:
            return replace(self, mismatch="none")
        has_ratio = isinstance(self.surrogate, str) and self.surrogate not in WITHOUT_RATIO
        return replace(self, mismatch="in_ratio" if has_ratio else "truncate_token")

    # --- once per rollout, on the global batch --------------------------------------------------------------

    def informative_groups(self, *, values: Tensor, reward_weights: Tensor) -> Tensor:
        """(P,) bool: the group's rewards differ as they are aggregated, so dynamic sampling keeps it. ``values``
        (R, P, G)."""
        rewards, valid = adv.combine_rewards(values, reward_weights)
        if self.reward_aggregation == "normalize_then_sum":
            rewards = self._normalized(values, reward_weights, valid)
        return adv.informative_groups(rewards, valid)

    def advantages(
        self,
        *,
        values: Tensor,
        reward_weights: Tensor,
        lengths: Tensor,
        truncated: Tensor,
        correct: Tensor | None = None,
        greedy_values: Tensor | None = None,
        sequence_kl: Tensor | None = None,
        max_completion_length: int | None = None,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> Advantages:
        """Rewards to advantages. Everything is of the global batch, gathered across ranks, so statistics are exact.

        A completion without any valid reward leaves its group's baseline, the loss and the normaliser; so does every
        completion of a prompt whose greedy completion has none. With a term that replaces rewards all advantages are
        0, none leaves for its rewards, and every group is informative.

        Args:
            values: (R, P, G), NaN where a reward is None; a reward that *is* NaN has to be refused before.
            reward_weights: (R,).
            lengths: (P, G) tokens that the policy wrote.
            truncated: (P, G) bool, a limit cut the completion off.
            correct: (P, G) bool, for ``samples: correct``.
            greedy_values: (R, P) rewards of the greedy completions, for ``baseline: greedy``.
            sequence_kl: (P, G) Σ_t (old_logprobs − ref_logprobs), for ``kl_placement: reward``.
            max_completion_length: for ``overlong_buffer``.
            old_logprobs: (P, G) Σ_t, like ``ref_logprobs`` and the mean ``entropy`` for an ``AdvantageEstimator``.

        Raises:
            ValueError: an infinite reward, an argument that the objective needs is missing, or an
                ``AdvantageEstimator`` that returns something else than finite advantages (P, G).
        """
        if not values.shape[1:] == lengths.shape == truncated.shape or lengths.shape[1] != self.group_size:
            raise ValueError(
                f"values {tuple(values.shape)}, lengths {tuple(lengths.shape)}, truncated {tuple(truncated.shape)}: "
                f"give (R, P, G), (P, G) and (P, G) with G = group_size = {self.group_size}."
            )
        rewards, valid = adv.combine_rewards(values, reward_weights)
        terms = self.active_terms.values()
        if any(term.replaces_rewards for term in terms):
            keep = ~truncated if self.mask_truncated else torch.ones_like(truncated)
            return Advantages(
                rewards=rewards.to(values.dtype),
                valid=valid,
                advantages=torch.zeros_like(values[0]),
                keep=keep,
                active=keep & (lengths > 0),
                informative=keep.any(dim=1),  # the teacher tells completions apart, whatever their rewards
            )
        shaped = self._shaped(values, reward_weights, rewards, lengths, sequence_kl, max_completion_length)
        usable, greedy, signal = valid, None, rewards
        if self.needs.greedy_values:
            if greedy_values is None:
                raise ValueError("baseline greedy needs greedy_values: the rewards of one greedy completion a prompt.")
            greedy, greedy_valid = adv.combine_rewards(greedy_values, reward_weights)
            usable = valid & greedy_valid.unsqueeze(1)
        if self.reward_aggregation == "normalize_then_sum":
            scaled = signal = self._normalized(values, reward_weights, valid)
        else:
            raw = adv.keep_best(shaped, usable) if self.max_rewards else shaped
            if isinstance(self.baseline, AdvantageEstimator):
                groups = RewardedGroups(
                    rewards=raw,
                    valid=usable,
                    lengths=lengths,
                    truncated=truncated,
                    correct=correct,
                    greedy=greedy,
                    old_logprobs=old_logprobs,
                    ref_logprobs=ref_logprobs,
                    entropy=entropy,
                )
                centred = self.baseline.checked(groups)
            else:
                centred = adv.subtract_baseline(raw, usable, baseline=self.baseline, greedy=greedy)
            scaled = adv.rescale(centred, raw, usable, lengths, scale=self.scale, ddof=self.std_ddof, eps=self.std_eps)
        keep = usable & ~truncated if self.mask_truncated else usable
        if self.samples == "correct":
            if correct is None:
                raise ValueError("samples: correct needs `correct`: mark one reward with correctness: true.")
            keep = keep & correct
        scaled = scaled.masked_fill(~keep, 0.0)
        final = not any(term.overrides("credit") for term in terms)  # a token's is 0 where its completion's is
        return Advantages(
            rewards=rewards.to(values.dtype),
            valid=valid,
            advantages=scaled.to(values.dtype),
            keep=keep,
            active=keep & (lengths > 0) & ((scaled != 0) | (not self.skips_zeros or not final)),
            informative=adv.informative_groups(signal, valid),
        )

    def _normalized(self, values: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
        return adv.normalize_each_reward(values.double(), weights, valid, ddof=self.std_ddof, eps=self.std_eps)

    def _shaped(
        self,
        values: Tensor,
        weights: Tensor,
        rewards: Tensor,
        lengths: Tensor,
        sequence_kl: Tensor | None,
        max_length: int | None,
    ) -> Tensor:
        """``rewards`` with the overlong penalty and the KL in the reward, where there are such; (P, G)."""
        if self.overlong_buffer > 0:
            if max_length is None:
                raise ValueError("overlong_buffer is set: pass max_completion_length.")
            penalty = adv.overlong_penalty(
                lengths.double(), max_completion_length=max_length, buffer=self.overlong_buffer
            )
            parts = torch.cat([values, penalty.to(values.dtype).unsqueeze(0)])
            rewards, _ = adv.combine_rewards(parts, torch.cat([weights, weights.new_ones(1)]))
        if self.kl_in_reward:
            if sequence_kl is None or not torch.isfinite(sequence_kl).all():
                raise ValueError(f"kl_placement reward needs a finite sequence_kl, got {sequence_kl}.")
            rewards = rewards - self.beta * sequence_kl.double()
        return rewards

    @property
    def grouping(self) -> Grouping:
        """How rewards are compared inside a group, for terms that credit parts of completions."""
        return Grouping(
            group_size=self.group_size,
            baseline=cast(Baseline, self.baseline),  # beside the shipped terms of that kind
            scale=self.scale,
            ddof=self.std_ddof,
            eps=self.std_eps,
        )

    @property
    def skips_zeros(self) -> bool:
        """A completion whose tokens all have advantage 0 contributes nothing at all, and is not forwarded."""
        own = self.surrogate == "nll" or isinstance(self.surrogate, SurrogateObjective)
        other = self.kl_in_loss or self.needs.entropy or any(t.acts_at_zero for t in self.active_terms.values())
        return self.skip_zero_advantage and not (own or other)

    # --- once per micro-batch -------------------------------------------------------------------------------

    def token_weights(
        self,
        mask: Tensor,
        *,
        num_sequences: float,
        num_tokens: float,
        max_completion_length: int,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """w (B, T) from the mask (B, T) of kept rows; the totals are ``Advantages.totals`` of the optimiser step."""
        return losses.token_weights(
            mask,
            aggregation=self.aggregation,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            max_completion_length=max_completion_length,
            dtype=dtype,
        )

    def loss(self, tokens: Mapping[str, Tensor], weights: Tensor) -> LossOutput:
        """Σ w · ( −surrogate + beta · KL − entropy_coef · H ) over the tokens of a micro-batch, and its metrics.

        All tensors are (B, T) of rows that are kept and active; where ``mask`` is False anything may stand in them.
        Differentiable in ``logprobs``, ``entropy`` and what terms read. Metrics count the tokens that are forwarded.

        Args:
            tokens: by name, those marked * always and others where the objective needs them (see `Needs`):

                - ``logprobs`` *: of the policy now, float32 or float64; half precision is refused, because ratios of it
                  are mostly rounding.
                - ``mask`` *: bool, the tokens that the policy wrote.
                - ``advantages`` *: (B, T), or (B, 1) for one per completion.
                - ``old_logprobs``: of the policy at collection, no gradient; without them ``logprobs.detach()``. Where
                  ``anchored_at_sampling``, ``sampling_logprobs`` take their place.
                - ``ref_logprobs``, ``sampling_logprobs``: of the reference, and as the engine drew the tokens.
                - ``entropy``: H of the next-token distribution; needed for the bonus, else only logged.
                - ``top_logprobs``, ``sampling_top_logprobs``, ``top_is_drawn``: (B, T, K) each, see `LikelyTokens`.
                - ``teacher_logprobs`` of a teacher, or ``divergence`` from its whole distributions, with a gradient;
                  ``taught``: (B, 1) bool, the completions that have a teacher, without it all.
                - ``observation_weights``: 1 / number of the batch's observation tokens at those, 0 elsewhere, where
                  ``mask`` is False.
                - what terms have prepared, by their names.
            weights: w, from ``token_weights``.

        Raises:
            ValueError: a tensor that the objective needs is missing, or half-precision log-probabilities.
        """
        batch, terms = self.token_batch(tokens), self.active_terms
        weight, drawn = sampler_weight(self, batch)
        stats = clip_stats(self, batch) | drawn
        total = with_masks(terms, with_policy_losses(terms, -surrogate(self, batch), batch) * weight, batch)
        if batch.ref_logprobs is not None:
            stats["kl"] = kl.estimate(self.kl_estimator, batch.logprobs, batch.ref_logprobs, batch.log_ratio.exp())
            total = total + self.beta * stats["kl"] if self.kl_in_loss else total
        total = with_losses(terms, total, batch, stats, behind_entropy=False)
        if batch.entropy is not None:
            total = total - self.entropy_coef * batch.entropy
            stats["entropy"] = batch.entropy
        total = with_losses(terms, total, batch, stats, behind_entropy=True)
        count = batch.mask.sum()
        sums = {name: (value.detach().masked_fill(~batch.mask, 0.0).sum(), count) for name, value in stats.items()}
        loss = with_extras(terms, (weights * total).masked_fill(~batch.mask, 0.0).sum(), tokens, sums)
        return LossOutput(loss=loss, stats=sums)

    def token_batch(self, tokens: Mapping[str, Tensor]) -> TokenBatch:
        """What surrogate and terms see of the ``tokens`` of `loss`: 0 where ``mask`` is False."""
        if tokens["logprobs"].dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log-probabilities are {tokens['logprobs'].dtype}: compute them in float32, whatever the model's "
                "dtype."
            )
        if missing := self.needs.missing(tokens):
            raise ValueError(f"this objective needs {missing}: see its property `needs`.")
        mask = tokens["mask"]
        seen = {
            name: tokens[name].masked_fill(~mask, 0.0)
            for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "sampling_logprobs")
            if name in tokens
        }
        logprobs = seen["logprobs"]
        old = seen["sampling_logprobs"] if self.anchored_at_sampling else seen.get("old_logprobs", logprobs.detach())
        advantages = with_advantages(self.active_terms, tokens["advantages"].to(logprobs.dtype), tokens)
        log_ratio = losses.masked_log_ratio(logprobs, old, mask)
        ratio = losses.importance_ratio(
            log_ratio,
            mask,
            advantages,
            level=self.ratio_level,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )
        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=old,
            log_ratio=log_ratio,
            ratio=ratio,
            advantages=advantages,
            mask=mask,
            ref_logprobs=seen.get("ref_logprobs"),
            entropy=seen.get("entropy"),
            sampling_logprobs=seen.get("sampling_logprobs"),
            likely=LikelyTokens.of(tokens) if self.needs.top_logprobs else None,
            more=tokens,
        )
