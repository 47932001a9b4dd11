"""``Objective``: the fields of the objective, and the tensors that they need."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Literal

from grpo_pl.functional.advantages import Baseline, Scale
from grpo_pl.functional.covariance import CovarianceControl
from grpo_pl.functional.kl import Estimator
from grpo_pl.functional.losses import Aggregation, DemonstrationWeighting, Mismatch, RatioLevel, Surrogate
from grpo_pl.functional.turn_credit import EpisodeStatistics
from grpo_pl.objective.custom import AdvantageEstimator, SurrogateObjective
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import Term

WITHOUT_RATIO = ("reinforce", "nll")
"""Surrogates that use no ratio to another policy."""
BUDGET = ("group_size", "num_iterations", "num_minibatches")
"""Fields that say how much is computed; presets leave them as they are."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Fields and ``needs_*`` properties of ``GRPOAlgorithm``; the defaults are the preset ``grpo``.

    Raises:
        ValueError: a value outside its range, or choices that contradict each other.
    """

    group_size: int = 8
    """Completions per prompt, G (DeepSeekMath, arXiv:2402.03300, eq. 3)."""
    num_iterations: int = 1
    """Passes over one rollout, mu (DeepSeekMath, algorithm 1, line 10)."""
    num_minibatches: int = 1
    """Optimiser steps per pass over a rollout; each takes an equal share of the completions (PPO, arXiv:1707.06347)."""

    supervision: Literal["outcome", "process", "turn", "token"] = "outcome"
    """outcome: one advantage per completion or episode (DeepSeekMath 4.1.2); process: one per token, from rewards of
    steps (4.1.3); turn: one per turn of an episode, see turn_advantage; token: outcome's, plus distillation_coef times
    log pi_teacher - log pi of the token itself, the reverse KL to model.teacher with discount 0 (on-policy
    distillation, Lu and Thinking Machines Lab, 2025)."""
    turn_advantage: Literal["returns", "gigpo"] = "returns"
    """Of supervision turn. returns: the turn's return-to-go less the baseline, the mean of the other episodes of the
    group from the same state, or of their returns where none has been there. gigpo: the episode's advantage in its
    group plus step_weight times the turn's among all turns in the same state (GiGPO, arXiv:2505.10978, eq. 8); scale
    none is its mean_norm, group_std divides both parts by their standard deviation."""
    gamma: float = 1.0
    """Discount of rewards from turn to turn, in supervision turn; that of gigpo's whole episode has none."""
    step_weight: float = 1.0
    """Weight of the turn's advantage beside the episode's in gigpo (its omega)."""
    episode_statistics: EpisodeStatistics = "episodes"
    """Mean and standard deviation of the episodes' returns in gigpo: each episode counts once, or, as in its authors'
    code (steps), as often as it has turns."""
    state_similarity: float | None = None
    """In supervision turn two texts count as one state where difflib's ratio reaches this number, in (0, 1]; null asks
    for equality."""
    invalid_action_penalty: float = 0.0
    """Taken off what gigpo compares of a turn with an invalid action, after discounting (0.1 in its authors' code)."""
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
    trust_region_top_k: int = 0
    """In dppo_* the divergence is that of this many tokens, those that were likeliest where the token was drawn, of the
    drawn one and of all others together, which the engine records (DPPO, "Top-K approximation"; the authors take 20).
    0: of the drawn token and all others."""
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

    distillation: Literal["none", "forward_kl", "reverse_kl", "jensen_shannon"] = "none"
    """Divergence over the whole vocabulary from model.teacher to the policy, a term of each token's loss:
    KL(teacher||pi), KL(pi||teacher), or the mixture's, m KL(teacher||M) + (1 - m) KL(pi||M) with M = m teacher +
    (1 - m) pi (GKD, arXiv:2306.13649, eq. 1)."""
    distillation_mix: float = 0.5
    """The share m of the teacher in jensen_shannon, in (0, 1) (GKD's beta)."""
    distillation_top_k: int = 0
    """Compare only this many tokens at each place, the policy's likeliest, both distributions renormalised over them
    (TRL's distillation_topk); 0: the whole vocabulary."""
    distillation_coef: float = 1.0
    """Weight of the teacher: of its part of the advantage in supervision token, there in [0, 1] for teacher_advantage
    reweigh, and of the divergence in distillation."""
    teacher_weights: Literal["model", "start", "live", "average"] = "model"
    """The teacher: model is model.teacher; the others are the policy itself with model.privileged in its prompt, as it
    started (OPSD, arXiv:2601.18734), as it is when the rollout is scored (SDFT, arXiv:2601.19897), or a moving average
    of its weights (SDPO, arXiv:2601.20802)."""
    teacher_rate: float = 0.05
    """Share of the policy in teacher_weights average after each rollout, in (0, 1] (TRL's teacher_update_rate)."""
    teacher_advantage: Literal["add", "reweigh"] = "add"
    """The teacher's part in supervision token. add: see there; reweigh: A times (1 - c) + c clip(exp(sign(A)
    (log pi_teacher - log pi)), 1 - teacher_clip, 1 + teacher_clip) with c = distillation_coef, so that the reward
    decides the direction and the teacher how much a token counts (RLSD, arXiv:2604.03128)."""
    teacher_clip: float = 0.2
    """Bound of the factor in teacher_advantage reweigh, in [0, 1)."""
    distillation_alone: bool = False
    """Learn from the teacher only: rewards are measured, but make no advantages; completions that none can judge are
    learned from as well."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus (PPO, eq. 9); with entropy_target that of the first rollout."""
    entropy_target: float | None = None
    """Nats a token that the entropy is held near: while a rollout's mean is at most this, the bonus is on and its
    weight grows by entropy_coef_step; above it the bonus is off and the weight falls (Skywork-OR1, arXiv:2505.22312,
    "Adaptive Entropy Control"); null keeps entropy_coef."""
    entropy_coef_step: float = 0.005
    """Change of the weight from one rollout to the next, with entropy_target."""
    entropy_coef_max: float = 1.0
    """Largest weight, with entropy_target; the smallest is 0."""
    top_entropy_quantile: float = 1.0
    """Share of tokens, those of highest entropy, that carry the policy term; 1 is all (arXiv:2506.01939). KL
    and entropy terms and the normaliser still cover all tokens."""

    covariance: CovarianceControl = "none"
    """Keeps entropy up by a few tokens, those where log-probability and advantage, both less their mean over the batch,
    have a high product (arXiv:2505.22617, eqs. 10 to 14). clip: some of those between covariance_min and covariance_max
    lose the policy term (Clip-Cov); kl: those of the highest get a penalty of covariance_kl_coef |log r| (KL-Cov). They
    are chosen once per rollout, by the log-probabilities before its first update."""
    covariance_share: float = 2e-4
    """Share of tokens that are chosen, one at least (2e-4 for clip; 2e-3 to 2e-4 for kl)."""
    covariance_min: float = 1.0
    """Lower bound of the product in covariance clip."""
    covariance_max: float = 5.0
    """Upper bound of the product in covariance clip."""
    covariance_kl_coef: float = 1.0
    """Weight of the penalty in covariance kl; it acts where a rollout is used for several updates."""

    observation_coef: float = 0.0
    """Weight of the cross-entropy on the tokens that the environment wrote between the policy's turns, their mean over
    the batch: the policy learns to predict what its actions lead to (ECHO, arXiv:2605.24517, its lambda; prime-rl takes
    0.1)."""

    demonstration_coef: float = 0.0
    """Share mu in (1 - mu) times the loss plus mu times the negative log-likelihood of model.demonstrations, their mean
    over tokens; at the start, if demonstration_decay_rollouts is above 0 (CHORD, arXiv:2508.11408)."""
    demonstration_coef_final: float = 0.0
    """The share after demonstration_decay_rollouts."""
    demonstration_decay_rollouts: int = 0
    """Rollouts over which the share falls, by half a cosine; 0 keeps it."""
    demonstration_weighting: DemonstrationWeighting = "equal"
    """Weight of a demonstration's token: equal, or uncertain: pi (1 - pi), so that what is known already and what seems
    impossible count little (CHORD-phi)."""

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
    """Replace groups of equal rewards by newly drawn ones (DAPO 3.2, eq. 11). Under supervision turn, the totals of
    episodes are compared: a group of equal totals goes even where its turns differ."""
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
    ratio; none elsewhere."""
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
    def needs_sequence_kl(self) -> bool:
        """``advantages`` wants ``sequence_kl``, Σ_t (old_logprobs − ref_logprobs): score before the advantages."""
        return self.beta > 0 and self.kl_placement == "reward"

    @property
    def needs_old_logprobs(self) -> bool:
        """Score the rollout under the policy before the first update; else ``loss`` takes ``old_logprobs=None``."""
        scored = not self.single_update and not self.anchored_at_sampling
        own = self.needs.old_logprobs or self._declared("needs_old_logprobs")
        return scored or own or self.needs_sequence_kl or self.needs_covariance

    @property
    def needs_reference(self) -> bool:
        """Reference log-probabilities: for either KL, or for a part that declares it."""
        return self.beta > 0 or self.needs.ref_logprobs or self._declared("needs_ref_logprobs")

    @property
    def needs_loss_reference(self) -> bool:
        """``loss`` wants ``ref_logprobs``."""
        return self.kl_in_loss or self.needs.ref_logprobs or getattr(self.surrogate, "needs_ref_logprobs", False)

    @property
    def needs_teacher_logprobs(self) -> bool:
        """``loss`` wants ``teacher_logprobs``."""
        return self.supervision == "token"

    @property
    def needs_divergence(self) -> bool:
        """``loss`` wants ``divergence``, of the whole distributions, with a gradient; see ``divergence_mix``."""
        return self.distillation != "none"

    @property
    def needs_teacher(self) -> bool:
        """A teacher scores the rollout."""
        return self.needs_teacher_logprobs or self.needs_divergence

    @property
    def teaches_itself(self) -> bool:
        """The teacher is the policy with ``model.privileged`` in its prompt."""
        return self.needs_teacher and self.teacher_weights != "model"

    @property
    def needs_start(self) -> bool:
        """A copy of the policy as it started: the reference of the KL, or the teacher."""
        return self.needs_reference or self.teacher_weights == "start"

    @property
    def reweighs(self) -> bool:
        """The teacher multiplies the advantages of rewards."""
        return self.supervision == "token" and self.teacher_advantage == "reweigh"

    @property
    def needs_observations(self) -> bool:
        """``loss`` wants ``observation_weights``, and log-probabilities of the tokens of observations as well."""
        return self.observation_coef > 0

    @property
    def needs_demonstrations(self) -> bool:
        """Each optimiser step also learns from demonstrations."""
        return self.demonstration_coef > 0

    @property
    def divergence_mix(self) -> float:
        """The divergence, in the numbering of ``grpo_pl.functional.divergence``."""
        ends = {"forward_kl": 0.0, "reverse_kl": 1.0}
        return ends.get(self.distillation, self.distillation_mix)

    @property
    def needs_entropy(self) -> bool:
        """``loss`` wants ``entropy`` with a gradient."""
        bonus = self.entropy_coef > 0 or self.entropy_target is not None
        return bonus or self.needs.entropy or getattr(self.surrogate, "needs_entropy", False)

    @property
    def needs_entropy_mask(self) -> bool:
        """``loss`` wants ``entropy_mask``: score the rollout before the first update, see ``entropy_threshold``."""
        return self.top_entropy_quantile < 1

    @property
    def needs_likely(self) -> bool:
        """``loss`` wants ``likely``: the engine records the tokens that were likeliest at each place."""
        return self.trust_region_top_k > 0

    @property
    def needs_covariance(self) -> bool:
        """``loss`` wants ``covariance_mask``: score the rollout before the first update, see ``high_covariance``."""
        return self.covariance != "none"

    @property
    def needs_old_entropy(self) -> bool:
        """Entropies before the first update: for the entropy mask, or for an estimator that declares them."""
        return self.needs_entropy_mask or self.needs.old_entropy or getattr(self.baseline, "needs_entropy", False)

    @property
    def needs_greedy_baseline(self) -> bool:
        """``advantages`` wants ``greedy_values``: draw and score one greedy completion per prompt (ReMax)."""
        return self.baseline == "greedy" or getattr(self.baseline, "needs_greedy_baseline", False)

    @property
    def needs_step_rewards(self) -> bool:
        """Use ``process_advantages`` for the loss; ``advantages`` still tells rewards, keep and active."""
        return self.supervision == "process"

    @property
    def needs_turns(self) -> bool:
        """Use ``turn_advantages`` for the loss; ``advantages`` still tells rewards, keep and active."""
        return self.supervision == "turn"

    @property
    def needs_correct(self) -> bool:
        """``advantages`` wants ``correct``."""
        return self.samples == "correct" or getattr(self.baseline, "needs_correct", False)

    @property
    def needs_sampling_logprobs(self) -> bool:
        """``loss`` wants ``sampling_logprobs``."""
        drawn = self.anchored_at_sampling or getattr(self.surrogate, "needs_sampling_logprobs", False)
        compared = self.off_policy_mask is not None or self.needs.sampling_logprobs
        return drawn or compared or self.mismatch not in ("none", "auto")

    @property
    def needs(self) -> Needs:
        """What the terms need."""
        return reduce(or_, (term.needs for term in self.active_terms.values()), Needs())

    @property
    def active_terms(self) -> dict[str, Term]:
        """The terms that were not removed."""
        return {name: term for name, term in self.terms.items() if term is not None}

    def _declared(self, need: str) -> bool:
        """True if a part that is a class declares ``need``."""
        return any(getattr(part, need, False) for part in (self.baseline, self.surrogate))
