"""``GRPOAlgorithm``: the training objective as one frozen dataclass, each field one orthogonal choice.

    L = Σ over tokens of w · ( −surrogate(ratio, A) + beta · KL − entropy_coef · H )

The pipeline asks the properties what it has to compute. Per rollout it calls :meth:`GRPOAlgorithm.advantages` on the
rewards of the global batch; per micro-batch, :meth:`GRPOAlgorithm.token_weights` and :meth:`GRPOAlgorithm.loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_pl.algorithm_checks import check_algorithm
from grpo_pl.functional import advantages as adv
from grpo_pl.functional import kl as kl_estimators
from grpo_pl.functional import losses
from grpo_pl.functional.losses import Aggregation, Mismatch, RatioLevel


@dataclass(frozen=True)
class Advantages:
    """What the rewards of one rollout mean for the loss; all (P, G) over the global batch."""

    rewards: Tensor  # (P, G) weighted sum as the rewards gave it (no KL, no overlong penalty); 0 where not valid
    valid: Tensor  # (P, G) bool: some reward that counts was computed
    advantages: Tensor  # (P, G), 0 where not kept
    keep: Tensor  # (P, G) bool: counts in the loss and in its normaliser
    active: Tensor  # (P, G) bool: must be forwarded; the other kept rows have no gradient and no loss
    informative: Tensor  # (P,) bool: the group's rewards differ

    def totals(self, lengths: Tensor, rows: Tensor | None = None) -> tuple[int, int]:
        """(num_sequences, num_tokens) for :meth:`GRPOAlgorithm.token_weights`: the kept completions and their tokens.

        Args:
            lengths: (P, G) completion tokens.
            rows: indices into the flattened batch that one optimiser step covers on all ranks together; None = all.
        """
        keep, lengths = self.keep.flatten(), lengths.flatten()
        if rows is not None:
            keep, lengths = keep[rows], lengths[rows]
        return int(keep.sum()), int((lengths * keep).sum())


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss, and of the metrics."""

    loss: Tensor
    """Plain sum over tokens of weight × token loss: shares of micro-batches and ranks add up to the loss."""
    stats: dict[str, tuple[Tensor, Tensor]]
    """Metric name -> (sum over tokens, number of tokens), detached; add both over micro-batches and ranks, divide
    last."""


@dataclass(frozen=True, kw_only=True)
class GRPOAlgorithm:
    """The objective. Presets are the overlays in ``configs/algorithm``; the defaults are the preset ``grpo``.

    Raises:
        ValueError: a value outside its range, or choices that contradict each other.
    """

    group_size: int = 8
    """Completions per prompt, G (DeepSeekMath, arXiv:2402.03300, eq. 3)."""
    num_iterations: int = 1
    """Passes over one rollout, mu (DeepSeekMath, algorithm 1, line 10)."""
    num_minibatches: int = 1
    """Optimiser steps per pass over a rollout; each takes an equal share of the completions (PPO, arXiv:1707.06347)."""

    supervision: Literal["outcome", "process"] = "outcome"
    """outcome: one advantage per completion (DeepSeekMath 4.1.2); process: one per token, from rewards of steps
    (4.1.3)."""
    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: add, then normalise; or normalise each in its group, add, divide by the batch std (GDPO,
    arXiv:2601.05242)."""
    max_rewards: bool = False
    """Keep each group's best rewards and turn all others into 0; needs baseline and scale none."""
    overlong_buffer: float = 0.0
    """Share of max_completion_length over which a penalty grows from 0 to 1; 0 is off (DAPO, arXiv:2503.14476, eq.
    13)."""
    baseline: adv.Baseline = "group_mean"
    """Subtracted from the reward: group_mean (GRPO), leave_one_out (RLOO, arXiv:2402.14740), batch_mean (REINFORCE++,
    arXiv:2501.03262), greedy: the reward of the greedy completion (ReMax, arXiv:2310.10505), none."""
    scale: adv.Scale = "group_std"
    """Divides the centred reward: group_std (GRPO), batch_std (TRL's scale_rewards=batch), token_whitening: mean
    and std over tokens (REINFORCE++), none (Dr. GRPO, arXiv:2503.20783)."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off the count in standard deviations: 1 is the sample's (torch.std), 0 the
    population's."""
    std_eps: float = 1e-5
    """Added to standard deviations before dividing (TRL 1e-4, verl 1e-6)."""

    ratio_level: RatioLevel = "token"
    """token: pi/pi_old of each token (GRPO); sequence: the length-normalised one of the completion (GSPO,
    arXiv:2507.18071, eq. 7); geometric: mean of the per-token clipped log-ratios (GMPO, arXiv:2507.20673, eq. 4),
    epsilons then bound log-ratios."""
    surrogate: Literal["clip", "unclipped", "reinforce", "cispo_capped", "cispo_clamped", "sapo", "nll"] = "clip"
    """clip: min(r A, clip(r) A) (PPO, eq. 7); unclipped: r A; reinforce: A log pi, no ratio; cispo_capped:
    sg(min(r, cispo_cap)) A log pi (TRL, ScaleRL, arXiv:2510.13786); cispo_clamped: sg(clip(r, 1 - epsilon_low, 1 +
    epsilon_high)) A log pi (MiniMax-M1, arXiv:2506.13585, eq. 4; verl); sapo: a sigmoid gate (arXiv:2511.20347);
    nll: log pi, whatever the advantage (expert iteration)."""
    epsilon_low: float = 0.2
    """The ratio is clipped below 1 - epsilon_low."""
    epsilon_high: float = 0.2
    """The ratio is clipped above 1 + epsilon_high; larger than epsilon_low is DAPO's clip-higher (eq. 10)."""
    dual_clip: float | None = None
    """Bounds the ratio of negative advantages, > 1 + epsilon_high (dual-clip PPO, arXiv:1912.09729, eq. 5; TRL's
    delta); null is off."""
    cispo_cap: float = 5.0
    """Upper bound of the ratio itself, not of its distance from 1, in cispo_capped (TRL's epsilon_high for cispo)."""
    sapo_temperature_positive: float = 1.0
    """Steepness of the gate for positive advantages (SAPO, eq. 6)."""
    sapo_temperature_negative: float = 1.05
    """Steepness of the gate for negative advantages; higher damps them sooner (SAPO, eq. 6)."""
    aggregation: Aggregation = "sequence_mean"
    """Weight of a token: sequence_mean 1/(N length) (GRPO, eq. 3), token_mean 1/all tokens (DAPO, eq. 8), constant
    1/(N max_completion_length) (Dr. GRPO)."""

    beta: float = 0.04
    """KL coefficient (DeepSeekMath, eq. 3); at 0 no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """What the gradient descends, as a term of the loss: k1 nothing (zero mean: noise), k2 KL(pi||ref) per prefix,
    k3 KL(ref||pi) per prefix (DeepSeekMath, eq. 4), k3_weighted (ratio k3) KL(pi||ref) per prefix (DeepSeek-V3.2,
    arXiv:2512.02556). k1 in the reward descends the KL of the whole sequence exactly."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: a term of each token (GRPO); reward: beta times the sum of k1 is subtracted from the reward (PPO, RLOO)."""
    reference: Literal["frozen", "refreshed"] = "frozen"
    """What beta pulls towards: the policy's start, or a copy renewed every ref_update_every rollouts (DeepSeekMath,
    algorithm 1)."""
    ref_update_every: int | None = None
    """Rollouts between two renewals of a refreshed reference."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus (PPO, eq. 9)."""
    top_entropy_quantile: float = 1.0
    """Share of tokens, those of highest entropy, that carry the policy term; 1 is all (arXiv:2506.01939, eq. 6). KL
    and entropy terms and the normaliser still cover all tokens."""

    samples: Literal["all", "correct"] = "all"
    """Completions in the loss: all, or only those that the correctness reward accepts (expert iteration, rejection
    sampling)."""
    mask_truncated: bool = False
    """Leave completions that hit max_completion_length out of the loss; the baseline still sees their rewards (DAPO
    3.4)."""
    skip_zero_advantage: bool = True
    """Do not forward completions whose advantage is exactly 0 when no KL or entropy term needs them; same gradient,
    less work."""
    dynamic_sampling: bool = False
    """Replace groups of equal rewards by newly drawn ones (DAPO 3.2, eq. 11)."""
    max_resample_attempts: int = 4
    """Most extra rollouts of dynamic sampling before the step goes on with the groups it has."""

    mismatch: Mismatch = "none"
    """Correction when another engine drew the tokens: pi_old/pi_sampling per token or per sequence, truncated at
    mismatch_max, or set to 0 outside [mismatch_min, mismatch_max] (truncated importance sampling; IcePop,
    arXiv:2510.18855)."""
    mismatch_min: float = 0.0
    """Lower bound of the mask_token and mask_sequence corrections."""
    mismatch_max: float = 2.0
    """Upper bound of the mismatch corrections."""

    def __post_init__(self) -> None:
        check_algorithm(self)

    # --- what the pipeline has to compute -------------------------------------------------------------------------

    @property
    def single_update(self) -> bool:
        """Exactly one optimiser step per rollout: ``old_logprobs=None`` (the ratio is 1), no pass for old log-probs."""
        return self.num_iterations == 1 and self.num_minibatches == 1

    @property
    def needs_reference(self) -> bool:
        """Reference log-probabilities: of ``loss`` for KL in the loss, of ``sequence_kl`` for KL in the reward."""
        return self.beta > 0

    @property
    def needs_sequence_kl(self) -> bool:
        """``advantages`` wants ``sequence_kl``, Σ_t (old_logprobs − ref_logprobs): score before the advantages."""
        return self.beta > 0 and self.kl_placement == "reward"

    @property
    def needs_loss_reference(self) -> bool:
        """``loss`` wants ``ref_logprobs``."""
        return self.beta > 0 and self.kl_placement == "loss"

    @property
    def needs_entropy(self) -> bool:
        """``loss`` wants ``entropy`` with a gradient."""
        return self.entropy_coef > 0

    @property
    def needs_entropy_mask(self) -> bool:
        """``loss`` wants ``entropy_mask``: score the rollout before the first update, see :meth:`entropy_threshold`."""
        return self.top_entropy_quantile < 1

    @property
    def needs_greedy_baseline(self) -> bool:
        """``advantages`` wants ``greedy_values``: draw and score one greedy completion per prompt (ReMax)."""
        return self.baseline == "greedy"

    @property
    def needs_step_rewards(self) -> bool:
        """Use :meth:`process_advantages` for the loss; :meth:`advantages` still tells rewards, keep and active."""
        return self.supervision == "process"

    @property
    def needs_correct(self) -> bool:
        """``advantages`` wants ``correct``."""
        return self.samples == "correct"

    @property
    def needs_sampling_logprobs(self) -> bool:
        """``loss`` wants ``sampling_logprobs``."""
        return self.mismatch != "none"

    @property
    def token_level(self) -> bool:
        """A token's loss depends on that token alone: ``loss`` may be called on any slice, e.g. tokens as (1, N)."""
        return self.ratio_level == "token" and self.mismatch not in ("truncate_sequence", "mask_sequence")

    # --- once per rollout, on the global batch ----------------------------------------------------------------------

    def informative_groups(self, *, values: Tensor, reward_weights: Tensor) -> Tensor:
        """(P,) bool: the group's weighted rewards differ, so dynamic sampling keeps it. ``values`` (R, P, G)."""
        return adv.informative_groups(*adv.combine_rewards(values, reward_weights))

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
    ) -> Advantages:
        """Rewards to advantages. Everything is of the global batch, gathered across ranks, so statistics are exact.

        A completion without any valid reward leaves its group's baseline, the loss and the normaliser; so does every
        completion of a prompt whose greedy completion has none.

        Args:
            values: (R, P, G), NaN where a reward is None (see ``functional.advantages.reward_tensor``).
            reward_weights: (R,).
            lengths: (P, G) completion tokens.
            truncated: (P, G) bool, the completion ended at the length limit.
            correct: (P, G) bool, for ``samples: correct``.
            greedy_values: (R, P) rewards of the greedy completions, for ``baseline: greedy``.
            sequence_kl: (P, G) Σ_t (old_logprobs − ref_logprobs), for ``kl_placement: reward``.
            max_completion_length: for ``overlong_buffer``.

        Raises:
            ValueError: an infinite reward, or an argument that the objective needs is missing.
        """
        rewards, valid = adv.combine_rewards(values.double(), reward_weights.double())
        shaped = rewards + self._shaping(lengths, sequence_kl, max_completion_length)
        usable, greedy = valid, None
        if self.baseline == "greedy":
            if greedy_values is None:
                raise ValueError("baseline greedy needs greedy_values: the rewards of one greedy completion a prompt.")
            greedy, greedy_valid = adv.combine_rewards(greedy_values.double(), reward_weights.double())
            usable = valid & greedy_valid.unsqueeze(1)
        if self.reward_aggregation == "normalize_then_sum":
            scaled = adv.normalize_each_reward(
                values.double(), reward_weights.double(), valid, ddof=self.std_ddof, eps=self.std_eps
            )
        else:
            raw = adv.keep_best(shaped, usable) if self.max_rewards else shaped
            centred = adv.subtract_baseline(raw, usable, baseline=self.baseline, greedy=greedy)
            scaled = adv.rescale(centred, raw, usable, lengths, scale=self.scale, ddof=self.std_ddof, eps=self.std_eps)
        keep = self._keep(usable, truncated, correct)
        scaled = scaled.masked_fill(~keep, 0.0)
        return Advantages(
            rewards=rewards.to(values.dtype),
            valid=valid,
            advantages=scaled.to(values.dtype),
            keep=keep,
            active=keep & (lengths > 0) & ((scaled != 0) | (not self._may_skip)),
            informative=adv.informative_groups(rewards, valid),
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

    def entropy_threshold(self, entropies: Tensor) -> Tensor:
        """The entropy that the top share of tokens reaches; ``entropy_mask = entropy >= threshold``.

        Args:
            entropies: (N,) of all kept completion tokens of the global batch, as scored before the first update.
        """
        ranked = entropies.sort(descending=True).values
        count = max(1, round(self.top_entropy_quantile * len(ranked)))
        return ranked[min(count, len(ranked)) - 1]

    def _shaping(self, lengths: Tensor, sequence_kl: Tensor | None, max_length: int | None) -> Tensor:
        """What is added to the weighted rewards: overlong penalty and KL in the reward; (P, G)."""
        shaping = torch.zeros_like(lengths, dtype=torch.float64)
        if self.overlong_buffer > 0:
            if max_length is None:
                raise ValueError("overlong_buffer is set: pass max_completion_length.")
            shaping += adv.overlong_penalty(
                lengths.double(), max_completion_length=max_length, buffer=self.overlong_buffer
            )
        if self.needs_sequence_kl:
            if sequence_kl is None or not torch.isfinite(sequence_kl).all():
                raise ValueError(f"kl_placement reward needs a finite sequence_kl, got {sequence_kl}.")
            shaping -= self.beta * sequence_kl.double()
        return shaping

    def _keep(self, usable: Tensor, truncated: Tensor, correct: Tensor | None) -> Tensor:
        keep = usable
        if self.samples == "correct":
            if correct is None:
                raise ValueError("samples: correct needs `correct`: mark one reward with correctness: true.")
            keep = keep & correct
        return keep & ~truncated if self.mask_truncated else keep

    @property
    def _may_skip(self) -> bool:
        """Whether a completion with advantage 0 contributes nothing at all."""
        other_terms = self.needs_loss_reference or self.entropy_coef > 0 or self.surrogate == "nll"
        return self.skip_zero_advantage and not other_terms and self.supervision == "outcome"

    # --- once per micro-batch ----------------------------------------------------------------------------------------

    def token_weights(
        self,
        mask: Tensor,
        *,
        num_sequences: float,
        num_tokens: float,
        max_completion_length: int,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """w (B, T) from the mask (B, T) of kept rows; totals are those of the optimiser step
        (``Advantages.totals``)."""
        return losses.token_weights(
            mask,
            aggregation=self.aggregation,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            max_completion_length=max_completion_length,
            dtype=dtype,
        )

    def loss(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        weights: Tensor,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        entropy_mask: Tensor | None = None,
        sampling_logprobs: Tensor | None = None,
    ) -> LossOutput:
        """Σ w · ( −surrogate + beta · KL − entropy_coef · H ) over the tokens of a micro-batch, and its metrics.

        All arguments are (B, T) of rows that are kept and active; where ``mask`` is False anything may stand in them.
        Differentiable in ``logprobs`` and ``entropy``. Metrics count the tokens that are forwarded.

        Args:
            logprobs: float32 or float64; half precision is refused, because ratios of it are mostly rounding.
            old_logprobs: of the policy at collection, no gradient; None means ``logprobs.detach()``.
            advantages: (B, T), or (B, 1) for one per completion.
            weights: from :meth:`token_weights`.
            entropy: H of the next-token distribution; needed for the bonus, else only logged.
            entropy_mask: bool, the tokens that carry the policy term (see :meth:`entropy_threshold`).

        Raises:
            ValueError: an argument that the objective needs is missing, or half-precision log-probabilities.
        """
        self._check_loss_arguments(logprobs, ref_logprobs, entropy, entropy_mask, sampling_logprobs)
        logprobs = logprobs.masked_fill(~mask, 0.0)
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        log_ratio = losses.masked_log_ratio(logprobs, old, mask)
        ratio = self._ratio(log_ratio, mask, advantages)
        policy = -self._surrogate(ratio, advantages, logprobs)
        stats = self._clip_stats(log_ratio, ratio, advantages)
        if sampling_logprobs is not None:
            drawn = sampling_logprobs.masked_fill(~mask, 0.0)
            rho = losses.mismatch_weights(
                old, drawn, mask, mode=self.mismatch, low=self.mismatch_min, high=self.mismatch_max
            )
            policy = policy * rho
            stats["sampling/importance_sampling_ratio/mean"] = rho
            stats["sampling/sampling_logp_difference/mean"] = (old - drawn).abs()
        if entropy_mask is not None:
            policy = policy * entropy_mask
        total = policy
        if ref_logprobs is not None:
            kl = self._kl(logprobs, ref_logprobs.masked_fill(~mask, 0.0), log_ratio)
            total = total + self.beta * kl if self.needs_loss_reference else total
            stats["kl"] = kl
        if entropy is not None:
            entropy = entropy.masked_fill(~mask, 0.0)
            total = total - self.entropy_coef * entropy
            stats["entropy"] = entropy
        count = mask.sum()
        sums = {name: (value.detach().masked_fill(~mask, 0.0).sum(), count) for name, value in stats.items()}
        return LossOutput(loss=(weights * total).masked_fill(~mask, 0.0).sum(), stats=sums)

    def _check_loss_arguments(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor | None,
        entropy: Tensor | None,
        entropy_mask: Tensor | None,
        sampling_logprobs: Tensor | None,
    ) -> None:
        if logprobs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log-probabilities are {logprobs.dtype}: compute them in float32, whatever the model's dtype."
            )
        for needed, tensor, name in (
            (self.needs_loss_reference, ref_logprobs, "ref_logprobs"),
            (self.needs_entropy, entropy, "entropy"),
            (self.needs_entropy_mask, entropy_mask, "entropy_mask"),
            (self.needs_sampling_logprobs, sampling_logprobs, "sampling_logprobs"),
        ):
            if needed and tensor is None:
                raise ValueError(f"this objective needs {name}: see the needs_* properties of GRPOAlgorithm.")

    def _ratio(self, log_ratio: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        if self.ratio_level == "token":
            return log_ratio.exp()
        if self.ratio_level == "sequence":
            return losses.sequence_ratio(log_ratio, mask)
        return losses.geometric_ratio(
            log_ratio, mask, advantages, epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high
        )

    def _surrogate(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
        if self.surrogate == "nll":
            return logprobs
        if self.surrogate == "reinforce":
            return advantages * logprobs
        if self.surrogate == "unclipped" or self.ratio_level == "geometric":
            return ratio * advantages
        if self.surrogate == "cispo_capped":
            return losses.cispo_surrogate(ratio, advantages, logprobs, low=None, high=self.cispo_cap)
        if self.surrogate == "cispo_clamped":
            low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
            return losses.cispo_surrogate(ratio, advantages, logprobs, low=low, high=high)
        if self.surrogate == "sapo":
            return losses.sapo_surrogate(
                ratio,
                advantages,
                temperature_positive=self.sapo_temperature_positive,
                temperature_negative=self.sapo_temperature_negative,
            )
        return losses.clip_surrogate(
            ratio,
            advantages,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            dual_clip=self.dual_clip,
        )

    def _kl(self, logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor) -> Tensor:
        if self.kl_estimator == "k1":
            return kl_estimators.k1(logprobs, ref_logprobs)
        if self.kl_estimator == "k2":
            return kl_estimators.k2(logprobs, ref_logprobs)
        if self.kl_estimator == "k3":
            return kl_estimators.k3(logprobs, ref_logprobs)
        return kl_estimators.k3_weighted(logprobs, ref_logprobs, log_ratio.exp())

    def _clip_stats(self, log_ratio: Tensor, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Per-token indicators under TRL's names; TRL's sequence-level ones count completions, these their tokens."""
        stats = {"ratio/mean": log_ratio.exp()}
        if self.surrogate == "cispo_capped":
            stats["cispo_clip_ratio"] = ((ratio > self.cispo_cap) & (advantages > 0)).to(ratio.dtype)
        elif self.surrogate in ("clip", "cispo_clamped"):
            geometric = self.ratio_level == "geometric"
            bounded = log_ratio if geometric else ratio - 1
            low = (bounded < -self.epsilon_low) & (advantages < 0)
            high = (bounded > self.epsilon_high) & (advantages > 0)
            stats["clip_ratio/low_mean"] = low.to(ratio.dtype)
            stats["clip_ratio/high_mean"] = high.to(ratio.dtype)
            stats["clip_ratio/region_mean"] = (low | high).to(ratio.dtype)
        return stats
