"""The rules about updates: they should move the policy, and not too far."""

from __future__ import annotations

from dataclasses import replace

from grpo_pl.tools.doctor.run_statistics import FEW_MIXED, MIN_ROLLOUTS, MOSTLY, RolloutStatistics, RunStatistics

Found = tuple[float, str, str] | None
"""Figure, sentence and field of a finding."""
LEAST_DRIFT = 0.1
"""Of a policy with an entropy of 1 nat a token or more; of one that is surer, in proportion less."""
MOST_KL = 0.3
MOST_CLIPPED = 0.5
FALL = 0.2
LEARNS = 0.05
"""By so much more must be right."""
MOVED = 0.5
BFLOAT16_GAIN = 1.3
"""bfloat16 must be so many times as fast, for what it rounds away."""


def slow(s: RunStatistics) -> Found:
    drift = s.mean(lambda rollout: _at_peak(rollout, rollout.logprob_change))
    if drift is None or not s.enough or s.share("mixed", "groups") <= FEW_MIXED or half_precision(s) or no_update(s):
        return None
    total = drift * s.settings.rollouts
    unsure = s.mean(lambda rollout: rollout.entropy)
    if total >= LEAST_DRIFT * (1.0 if unsure is None else min(1.0, unsure)):
        return None
    weights = s.mean(lambda rollout: _at_peak(rollout, rollout.weight_change)) or 0.0
    return (
        total,
        f"the updates of a rollout change the weights by {weights:.1e} of themselves and the log-probability of a "
        f"token by {drift:.1e}: over all {s.settings.rollouts} rollouts by {total:.2g} at most.",
        "model.optimization.lr (higher), or data.steps",
    )


def _at_peak(rollout: RolloutStatistics, change: float | None) -> float | None:
    return None if change is None or not rollout.mixed else change / rollout.rate


def fast(s: RunStatistics) -> Found:
    kl, clipped = s.mean(lambda rollout: rollout.kl), s.mean(lambda rollout: rollout.clipped)
    if len(s.rollouts) < MIN_ROLLOUTS:
        return None
    field = "model.optimization.lr (lower), or warmup_rollouts (more)"
    if kl is not None and kl > MOST_KL:
        return kl, f"the updates of one rollout move the policy by a KL divergence of {kl:.2g} a token.", field
    if clipped is not None and clipped > MOST_CLIPPED:
        return clipped, f"{clipped:.0%} of the tokens are outside the clip range.", field
    # a policy may grow sure of what is right: nearly all is, or more than in the first half of the rollouts
    half = len(s.rollouts) // 2
    first, last = replace(s, rollouts=s.rollouts[:half]), replace(s, rollouts=s.rollouts[half:])
    learns = s.share("right") >= MOSTLY or last.share("right") >= first.share("right") + LEARNS
    entropies = [rollout.entropy for rollout in s.rollouts if rollout.entropy is not None]
    if len(entropies) >= MIN_ROLLOUTS and entropies[-1] < FALL * entropies[0] and not learns:
        return (
            entropies[-1] / entropies[0],
            f"the entropy of a token fell from {entropies[0]:.2g} to {entropies[-1]:.2g} in {len(entropies)} rollouts.",
            field,
        )
    return None


def half_precision(s: RunStatistics) -> Found:
    moved = s.mean(lambda rollout: rollout.moved if rollout.mixed else None)
    if not s.settings.half_precision or moved is None or moved >= MOVED or no_update(s):
        return None
    return (
        moved,
        f"{moved:.0%} of the weights change in an update: the others round back to what they were.",
        "model.policy.dtype (float32; trainer.precision: bf16-mixed computes in 16 bits)",
    )


def no_update(s: RunStatistics) -> Found:
    skipped = s.total("skipped")
    moved = s.mean(lambda rollout: rollout.moved if rollout.mixed else None)
    if skipped:
        return float(skipped), f"{skipped} updates had a loss or gradient that is not finite and were skipped.", _RATE
    if moved is None or moved > 0.0 or not s.enough:
        return None
    return 0.0, f"no weight changed in {len(s.rollouts)} rollouts, although rewards differ.", _RATE


def faster_in_bfloat16(s: RunStatistics) -> Found:
    gain = s.mean(lambda rollout: rollout.bfloat16_gain)
    if gain is None or gain < BFLOAT16_GAIN:
        return None
    return gain, f"this CPU computes a step {gain:.2f} times as fast in bfloat16.", "trainer.precision (bf16-mixed)"


_RATE = "model.optimization.lr, or model.algorithm"
