"""``Objective``: the fields of the objective, and what they need."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import reduce
from operator import or_
from typing import Any, Literal

from grpo_pl.functional.advantages import Baseline, Scale
from grpo_pl.functional.kl import Estimator
from grpo_pl.functional.losses import Aggregation, Mismatch, RatioLevel, Surrogate
from grpo_pl.objective.custom import AdvantageEstimator, SurrogateObjective
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Term
from grpo_pl.objective.terms.hooks import needed

WITHOUT_RATIO = ("reinforce", "nll")
"""Surrogates that use no ratio to another policy."""
BUDGET = ("group_size", "num_iterations", "num_minibatches")
"""Fields that say how much is computed; presets leave them as they are."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Fields of ``GRPOAlgorithm``, and what they need; the defaults are the preset ``grpo``.

    Raises:
        ValueError: a value outside its range, or choices that contradict each other.
    """

    group_size: int = 8
    """Completions per prompt, G (DeepSeekMath, arXiv:2402.03300, eq. 3)."""
    num_iterations: int = 1
    """Passes over one rollout, mu (DeepSeekMath, algorithm 1, line 10)."""
    num_minibatches: int = 1
    """Optimiser steps per pass over a rollout; each takes an equal share of the completions (PPO, arXiv:1707.06347)."""

    reward_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: add, then normalise; or normalise each in its group, add, divide by the batch std (GDPO,
    arXiv:2601.05242)."""
    max_rewards: bool = False
    """Keep each group's best rewards and turn all others into 0; needs baseline and scale none."""
    overlong_buffer: float = 0.0
    """Share of max_completion_length over which a penalty grows from 0 to 1; 0 is off (DAPO, arXiv:2503.14476, eq.
    13)."""
    baseline: Baseline | AdvantageEstimator = "group_mean"
    """Subtracted from the reward: group_mean (GRPO), leave_one_out (RLOO, arXiv:2402.14740), batch_mean (REINFORCE++,
    arXiv:2501.03262), greedy: the reward of the greedy completion (ReMax, arXiv:2310.10505), none; or a class of one's
    own that makes advantages of rewards."""
    scale: Scale = "group_std"
    """Divides the centred reward: group_std (GRPO), group_mean: of rewards of 0 and 1, 0 where none is 1 (MaxRL,
    arXiv:2602.02710, algorithm 1), batch_std (TRL's scale_rewards=batch), token_whitening: mean and std over tokens
    (REINFORCE++), none (Dr. GRPO, arXiv:2503.20783)."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off the count in standard deviations: 1 is the sample's (torch.std), 0 the
    population's."""
    std_eps: float = 1e-5
    """Added to standard deviations before dividing (TRL 1e-4, verl 1e-6)."""

    ratio_level: RatioLevel = "token"
    """token: pi/pi_old of each token (GRPO); sequence: the length-normalised one of the completion (GSPO,
    arXiv:2507.18071, eq. 7); geometric: mean of the per-token clipped log-ratios (GMPO, arXiv:2507.20673),
    epsilons then bound log-ratios."""
    surrogate: Surrogate | SurrogateObjective = "clip"
    """clip: min(r A, clip(r) A) (PPO, eq. 7); unclipped: r A; reinforce: A log pi, no ratio; cispo_capped:
    sg(min(r, cispo_cap)) A log pi (TRL, ScaleRL, arXiv:2510.13786); cispo_clamped: sg(clip(r, 1 - epsilon_low, 1 +
    epsilon_high)) A log pi (MiniMax-M1, arXiv:2506.13585, eq. 4; verl); sapo: a sigmoid gate (arXiv:2511.20347);
    dppo_tv, dppo_kl: r A of the ratio to the policy that drew the token, 0 where the advantage leads further out of a
    trust region, by total variation or KL(drew||pi) of "this token or another one" (DPPO, arXiv:2602.04879, eqs. 11 to
    14), epsilons then bound that divergence; vespo: sg(W^k e^(lambda (1 - W))) A log pi with the ratio W of the whole
    completion, not normalised by its length (VESPO, arXiv:2602.10693); nll: log pi, whatever the advantage (expert
    iteration); or a class of one's own."""
    epsilon_low: float = 0.2
    """The ratio is clipped below 1 - epsilon_low; in dppo_* the divergence allowed to tokens of negative advantage."""
    epsilon_high: float = 0.2
    """The ratio is clipped above 1 + epsilon_high; larger than epsilon_low is DAPO's clip-higher (eq. 10). In dppo_*
    the divergence allowed to tokens of positive advantage."""
    dual_clip: float | None = None
    """Bounds the ratio of negative advantages, > 1 + epsilon_high (dual-clip PPO, arXiv:1912.09729; TRL's
    delta); null is off."""
    cispo_cap: float = 5.0
    """Upper bound of the ratio itself, not of its distance from 1, in cispo_capped (TRL's epsilon_high for cispo)."""
    sapo_temperature_positive: float = 1.0
    """Steepness of the gate for positive advantages (SAPO)."""
    sapo_temperature_negative: float = 1.05
    """Steepness of the gate for negative advantages; higher damps them sooner (SAPO)."""
    vespo_k_positive: float = 2.0
    """Power k of W in vespo for advantages of at least 0: higher damps completions that have become less likely."""
    vespo_lambda_positive: float = 3.0
    """Decay lambda in vespo for advantages of at least 0: higher damps completions that have become more likely."""
    vespo_k_negative: float = 3.0
    """Power k of W in vespo for negative advantages."""
    vespo_lambda_negative: float = 2.0
    """Decay lambda in vespo for negative advantages."""
    aggregation: Aggregation = "sequence_mean"
    """Weight of a token: sequence_mean 1/(N length) (GRPO, eq. 3), token_mean 1/all tokens (DAPO, eq. 8), constant
    1/(N max_completion_length) (Dr. GRPO), sequence_sum 1/N (LUSPO, arXiv:2602.05261)."""

    beta: float = 0.04
    """KL coefficient (DeepSeekMath, eq. 3); at 0 no reference model is loaded."""
    kl_estimator: Estimator = "k3"
    """Estimator of the KL. As a term of the loss its gradient descends: k1 nothing (zero mean: noise), k2 KL(pi||ref)
    per prefix, k3 KL(ref||pi) per prefix (DeepSeekMath, eq. 4), k3_weighted (ratio k3) KL(pi||ref) per prefix
    (DeepSeek-V3.2, arXiv:2512.02556). k1 in the reward descends the KL of the whole sequence exactly."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: a term of each token (GRPO); reward: beta times the sum of k1 is subtracted from the reward (PPO, RLOO)."""
    reference: Literal["frozen", "refreshed"] = "frozen"
    """Reference of the KL: the policy's start, or a copy renewed every ref_update_every rollouts (DeepSeekMath,
    algorithm 1)."""
    ref_update_every: int | None = None
    """Rollouts between two renewals of a refreshed reference."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus (PPO, eq. 9)."""
    samples: Literal["all", "correct"] = "all"
    """Completions in the loss: all, or only those that the correctness reward accepts (expert iteration, rejection
    sampling)."""
    mask_truncated: bool = False
    """Leave completions that hit max_completion_length, and episodes that ended by a limit on turns or tokens, out of
    the loss; the baseline still sees their rewards (DAPO 3.4)."""
    skip_zero_advantage: bool = True
    """Do not forward completions whose advantage is exactly 0 when no KL or entropy term needs them; same gradient,
    less work."""
    dynamic_sampling: bool = False
    """Replace groups of equal rewards by newly drawn ones (DAPO 3.2, eq. 11). Of episodes whose turns are credited the
    totals are compared: a group of equal totals goes even where its turns differ."""
    max_resample_attempts: int = 4
    """Most extra rollouts of dynamic sampling before the step goes on with the groups it has."""

    mismatch: Literal["auto", "in_ratio", Mismatch] = "auto"
    """Correction when the tokens were drawn from other probabilities, by another engine or earlier weights. in_ratio:
    pi_sampling takes the place of pi_old, so that the surrogate's ratio corrects and its clip bounds how far the policy
    may go from what drew the tokens (PPO, arXiv:1707.06347, eq. 7). The others weigh the policy term by
    pi_old/pi_sampling per token or per sequence, truncated at mismatch_max, or set to 0 outside [mismatch_min,
    mismatch_max] (truncated importance sampling; IcePop, arXiv:2510.18855); reject_geometric: no weights, but a
    completion leaves the policy term where the geometric mean of its ratios is outside the bounds, which are close to 1
    then, e.g. 0.999 and 1.001 (verl's geometric rejection); seq_mask_tis: the same completions leave, and the tokens of
    the others have their weights (sequence-masked truncated importance sampling of OpenRLHF and NeMo-RL). auto: where
    data.staleness is above 0 or completions are drawn in parts, in_ratio, or truncate_token for a surrogate without a
    ratio; none elsewhere. With several updates a rollout in_ratio also saves the forward pass for pi_old."""
    mismatch_min: float = 0.0
    """Lower bound of the mask_token, mask_sequence, reject_geometric and seq_mask_tis corrections."""
    mismatch_max: float = 2.0
    """Upper bound of the mismatch corrections."""
    off_policy_mask: float | None = None
    """Tokens of negative advantage lose their policy term in completions whose mean of log(pi_sampling/pi) is above
    this number, so that the policy has moved away from what was drawn (DeepSeek-V3.2, arXiv:2512.02556, eq. 9); null is
    off."""

    terms: dict[str, Term | None] = field(default_factory=dict, hash=False)
    """Rare parts of the objective by name, each a class of grpo_pl.objective.terms or of one's own, given by class_path
    and init_args; null removes one that an earlier file names."""

    # --- what the pipeline has to compute -------------------------------------------------------------------

    @property
    def single_update(self) -> bool:
        """Exactly one optimiser step per rollout: the ratio is 1, its gradient alive, for ``old_logprobs=None``."""
        return self.num_iterations == 1 and self.num_minibatches == 1

    @property
    def anchored_at_sampling(self) -> bool:
        """π_old is the policy that drew the tokens, as the engine drew them, and is not scored."""
        return self.bounds_divergence or self.mismatch == "in_ratio"

    @property
    def bounds_divergence(self) -> bool:
        """The surrogate is DPPO's, whose ratio is always to the policy that drew the tokens."""
        return self.surrogate in ("dppo_tv", "dppo_kl")

    @property
    def correction(self) -> str:
        """The choice that corrects for samples of earlier weights or of another engine, or none."""
        return str(self.surrogate) if self.anchored_at_sampling else self.mismatch

    @property
    def kl_in_loss(self) -> bool:
        """``loss`` adds beta times the KL."""
        return self.beta > 0 and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """``advantages`` wants ``sequence_kl``, Σ_t (old_logprobs − ref_logprobs): score before the advantages."""
        return self.beta > 0 and self.kl_placement == "reward"

    @property
    def active_terms(self) -> dict[str, Term]:
        """The terms that were not removed."""
        return {name: term for name, term in self.terms.items() if term is not None}

    def values(self) -> dict[str, Any]:
        """All fields, terms as a configuration holds them."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return found | {"terms": {name: term.spec() for name, term in self.active_terms.items()}}

    @property
    def needs(self) -> Needs:
        """What the pipeline has to compute: for the fields, for parts that are classes, and for the terms."""
        scored = not self.single_update and not self.anchored_at_sampling
        corrected = self.anchored_at_sampling or self.mismatch not in ("none", "auto")
        own = Needs(
            old_logprobs=scored or self.kl_in_reward,
            ref_logprobs=self.kl_in_loss,
            reference=self.kl_in_reward,
            sampling_logprobs=corrected or self.off_policy_mask is not None,
            entropy=self.entropy_coef > 0,
            correct=self.samples == "correct",
            greedy_values=self.baseline == "greedy",
        )
        parts = (self.baseline, self.surrogate)
        declared = [part.needs for part in parts if isinstance(part, AdvantageEstimator | SurrogateObjective)]
        return reduce(or_, [*declared, *needed(self.active_terms)], own)
