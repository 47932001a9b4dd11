"""``GRPOAlgorithm``: the training objective as one frozen dataclass, each field one orthogonal choice.

    L = Σ over tokens of w · ( −surrogate(ratio, A) + beta · KL + distillation_coef · D − entropy_coef · H )

D is the divergence from a teacher's distribution, where one is asked for. The pipeline asks the ``needs_*`` properties
what it has to compute. Per rollout it calls ``advantages`` on the rewards of the global batch; per micro-batch,
``token_weights`` and ``loss``. A subclass may override any of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor

from grpo_pl.functional import advantages as adv
from grpo_pl.functional import covariance, losses, turn_credit
from grpo_pl.functional.advantages import Advantages
from grpo_pl.functional.losses import LossOutput
from grpo_pl.functional.sampling import row_key
from grpo_pl.functional.trust_region import LikelyTokens
from grpo_pl.objective.checks import check_objective
from grpo_pl.objective.custom import AdvantageEstimator, RewardedGroups, SurrogateObjective, TokenBatch
from grpo_pl.objective.fields import WITHOUT_RATIO, Objective
from grpo_pl.objective.policy_term import token_losses

__all__ = ["Advantages", "GRPOAlgorithm", "LossOutput"]


@dataclass(frozen=True, kw_only=True)
class GRPOAlgorithm(Objective):
    """GRPO and its relatives; presets are in ``configs/algorithm``, the defaults are ``grpo``.

    Raises:
        ValueError: choices that contradict each other, or a value out of its range.
    """

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
        completion of a prompt whose greedy completion has none. With ``distillation_alone`` all advantages are 0, and
        none leaves for its rewards, and every group is informative.

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
        if self.distillation_alone:
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
        if self.needs_greedy_baseline:
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
        final = self.supervision == "outcome" or self.reweighs  # a token's advantage is 0 where its completion's is
        return Advantages(
            rewards=rewards.to(values.dtype),
            valid=valid,
            advantages=scaled.to(values.dtype),
            keep=keep,
            active=keep & (lengths > 0) & ((scaled != 0) | (not self.skips_zeros or not final)),
            informative=adv.informative_groups(signal, valid),
        )

    def process_advantages(self, *, step_values: Tensor, step_ends: Tensor, width: int) -> Tensor:
        """Rewards of steps to advantages of tokens (B, T), normalised inside each group; whole groups, in order.

        Args:
            step_values: (B, K), NaN where there is no step or its reward is None.
            step_ends: (B, K) int64, index of each step's last completion token.
            width: T, the padded completion length.
        """
        return adv.process_advantages(
            step_values,
            step_ends,
            group_size=self.group_size,
            width=width,
            scale=self.scale,
            ddof=self.std_ddof,
            eps=self.std_eps,
        )

    def turn_advantages(
        self,
        *,
        rewards: Tensor,
        present: Tensor,
        states: Sequence[Sequence[Hashable]],
        valid: Tensor,
        invalid_actions: Tensor,
    ) -> Tensor:
        """Rewards of turns to advantages of turns (B, K), compared inside each group; whole groups, in order.

        Args:
            rewards: (B, K) what the rewards give each turn, finite.
            present: (B, K) bool, the turns that an episode has: its first ones.
            states: of each turn of each episode, where its action was taken.
            valid: (B,) bool; other episodes are compared with nothing and get 0.
            invalid_actions: (B, K) bool.
        """
        anchors = turn_credit.anchor_groups(states, group_size=self.group_size, similarity=self.state_similarity)
        if self.turn_advantage == "returns":
            baseline = cast(turn_credit.TurnBaseline, self.baseline)  # others are refused
            return turn_credit.turn_returns(
                rewards, present, anchors, group_size=self.group_size, valid=valid, gamma=self.gamma, baseline=baseline
            )
        return turn_credit.gigpo_advantages(
            rewards,
            present,
            anchors,
            group_size=self.group_size,
            valid=valid,
            step_weight=self.step_weight,
            gamma=self.gamma,
            norm="mean" if self.scale == "none" else "mean_std",
            statistics=self.episode_statistics,
            invalid_actions=invalid_actions,
            invalid_action_penalty=self.invalid_action_penalty,
            eps=self.std_eps,
        )

    def entropy_threshold(self, entropies: Tensor) -> Tensor:
        """The entropy that the top share of tokens reaches; ``entropy_mask = entropy >= threshold``.

        Args:
            entropies: (N,) of all kept completion tokens of the global batch, as scored before the first update.
        """
        ranked = entropies.sort(descending=True).values
        if not len(ranked):
            return entropies.new_tensor(torch.inf)
        return ranked[max(1, round(self.top_entropy_quantile * len(ranked))) - 1]

    def high_covariance(self, logprobs: Tensor, advantages: Tensor, *, step: int) -> Tensor:
        """(N,) bool: the tokens that ``covariance`` is about, for ``covariance_mask``.

        Args:
            logprobs: (N,) of all kept completion tokens of the global batch, as scored before the first update.
            advantages: (N,) of the same tokens.
            step: of the rollout, which the draw of Clip-Cov follows from.
        """
        return covariance.select(
            logprobs,
            advantages,
            kind=self.covariance,
            share=self.covariance_share,
            low=self.covariance_min,
            high=self.covariance_max,
            seed=row_key("covariance", step),
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
        if self.needs_sequence_kl:
            if sequence_kl is None or not torch.isfinite(sequence_kl).all():
                raise ValueError(f"kl_placement reward needs a finite sequence_kl, got {sequence_kl}.")
            rewards = rewards - self.beta * sequence_kl.double()
        return rewards

    @property
    def skips_zeros(self) -> bool:
        """A completion whose tokens all have advantage 0 contributes nothing at all, and is not forwarded."""
        own = self.surrogate == "nll" or isinstance(self.surrogate, SurrogateObjective)
        taught = self.needs_teacher and not self.reweighs
        other_terms = own or self.kl_in_loss or self.needs_entropy or self.covariance == "kl" or taught
        return self.skip_zero_advantage and not (other_terms or self.active_terms or self.needs_observations)

    def demonstration_share(self, rollout: int) -> float:
        """The share of demonstrations in the loss of a rollout."""
        decay, last = self.demonstration_decay_rollouts, self.demonstration_coef_final
        last = last if decay else self.demonstration_coef
        return losses.demonstration_share(rollout, first=self.demonstration_coef, last=last, decay_rollouts=decay)

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
        """Σ w · ( −surrogate + beta · KL + distillation_coef · D − entropy_coef · H ) over the tokens of a micro-batch,
        and its metrics.

        All tensors are (B, T) of rows that are kept and active; where ``mask`` is False anything may stand in them.
        Differentiable in ``logprobs``, ``entropy`` and ``divergence``. Metrics count the tokens that are forwarded.

        Args:
            tokens: by name, those marked * always and others where the objective asks for them:

                - ``logprobs`` *: of the policy now, float32 or float64; half precision is refused, because ratios of it
                  are mostly rounding.
                - ``mask`` *: bool, the tokens that the policy wrote.
                - ``advantages`` *: (B, T), or (B, 1) for one per completion.
                - ``old_logprobs``: of the policy at collection, no gradient; without them ``logprobs.detach()``. Where
                  ``anchored_at_sampling``, ``sampling_logprobs`` take their place.
                - ``ref_logprobs``, ``sampling_logprobs``: of the reference, and as the engine drew the tokens.
                - ``entropy``: H of the next-token distribution; needed for the bonus, else only logged.
                - ``entropy_mask``: bool, the tokens that carry the policy term (see ``entropy_threshold``).
                - ``covariance_mask``: bool, the tokens that ``covariance`` clips or holds back (see
                  ``high_covariance``).
                - ``top_logprobs``, ``sampling_top_logprobs``, ``top_is_drawn``: (B, T, K) each, the fields of
                  `LikelyTokens`, for ``trust_region_top_k``.
                - ``teacher_logprobs``: of the teacher. Supervision ``token`` adds distillation_coef · (log π_T −
                  sg(log π)) to the advantages, with the policy as it is now, so that r · A has the gradient of the
                  per-prefix KL(π‖π_T) however old the policy is that drew the tokens; ``teacher_advantage: reweigh``
                  multiplies, see ``grpo_pl.functional.advantages.reweighed``.
                - ``divergence``: D, from the teacher's whole distribution, for ``distillation``.
                - ``taught``: (B, 1) bool, the completions that have a teacher; others have no term of it. Without it
                  all.
                - ``observation_weights``: 1 / number of the batch's observation tokens at those, 0 elsewhere: the
                  cross-entropy Σ w · (−log π) over them times observation_coef is added. ``mask`` is False there.
            weights: w, from ``token_weights``.

        Raises:
            ValueError: a tensor that the objective needs is missing, or half-precision log-probabilities.
        """
        batch = self._token_batch(tokens)
        total, stats = token_losses(self, batch, tokens)
        taught = batch.mask & tokens["taught"] if "taught" in tokens else batch.mask
        if self.needs_divergence:
            divergence = tokens["divergence"].masked_fill(~taught, 0.0)
            total = total + self.distillation_coef * divergence
            stats["teacher/divergence"] = divergence
        if self.needs_teacher_logprobs:
            stats["teacher/kl"] = -self._teacher_gap(tokens, batch.logprobs)
        if "taught" in tokens and self.needs_teacher:
            stats["teacher/taught"] = tokens["taught"].to(total.dtype).expand_as(total)
        count = batch.mask.sum()
        sums = {name: (value.detach().masked_fill(~batch.mask, 0.0).sum(), count) for name, value in stats.items()}
        loss = (weights * total).masked_fill(~batch.mask, 0.0).sum()
        if self.needs_observations:
            observed = tokens["observation_weights"] > 0
            surprise = -tokens["logprobs"].masked_fill(~observed, 0.0)
            loss = loss + self.observation_coef * (tokens["observation_weights"] * surprise).sum()
            sums["observation/nll"] = (surprise.detach().sum(), observed.sum())
        return LossOutput(loss=loss, stats=sums)

    def _token_batch(self, tokens: Mapping[str, Tensor]) -> TokenBatch:
        """What surrogate and terms see: 0 where ``mask`` is False."""
        if tokens["logprobs"].dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log-probabilities are {tokens['logprobs'].dtype}: compute them in float32, whatever the model's "
                "dtype."
            )
        for name, needed in (
            ("ref_logprobs", self.needs_loss_reference),
            ("entropy", self.needs_entropy),
            ("entropy_mask", self.needs_entropy_mask),
            ("covariance_mask", self.needs_covariance),
            ("sampling_logprobs", self.needs_sampling_logprobs),
            ("teacher_logprobs", self.needs_teacher_logprobs),
            ("divergence", self.needs_divergence),
            ("top_logprobs", self.needs_likely),
            ("observation_weights", self.needs_observations),
        ):
            if needed and name not in tokens:
                raise ValueError(f"this objective needs {name}: see the needs_* properties of GRPOAlgorithm.")
        mask = tokens["mask"]
        seen = {
            name: tokens[name].masked_fill(~mask, 0.0)
            for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "sampling_logprobs")
            if name in tokens
        }
        logprobs = seen["logprobs"]
        old = seen["sampling_logprobs"] if self.anchored_at_sampling else seen.get("old_logprobs", logprobs.detach())
        advantages = tokens["advantages"].to(logprobs.dtype)
        if self.needs_teacher_logprobs:
            gap = self._teacher_gap(tokens, logprobs)
            if self.reweighs:
                advantages = adv.reweighed(advantages, gap, share=self.distillation_coef, clip=self.teacher_clip)
            else:
                advantages = advantages + self.distillation_coef * gap
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
            likely=self._likely(tokens) if self.needs_likely else None,
            more=tokens,
        )

    def _likely(self, tokens: Mapping[str, Tensor]) -> LikelyTokens:
        now = tokens["top_logprobs"]
        return LikelyTokens(now, tokens["sampling_top_logprobs"].to(now.dtype), tokens["top_is_drawn"])

    def _teacher_gap(self, tokens: Mapping[str, Tensor], logprobs: Tensor) -> Tensor:
        """log π_T − sg(log π), 0 where there is no teacher."""
        taught = tokens["mask"] & tokens["taught"] if "taught" in tokens else tokens["mask"]
        return (tokens["teacher_logprobs"] - logprobs.detach()).masked_fill(~taught, 0.0)
