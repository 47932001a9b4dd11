"""Finds in a run's metrics whether rewards were equal in every group for many rollouts: there is nothing to learn."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_pl.evaluation.curves import Points

ROLLOUTS = 10
"""Rollouts in a row with equal rewards in every group, from which on the run is said to have no signal."""
CAUSES = (
    "Likely causes: problems too hard or too easy for the policy (grpo-pl filter, a cold start, another model); "
    "completions cut off before their answer (completions/clipped_ratio, model.sampling.max_completion_length); "
    "rewards that find no answer (read completions.jsonl: prompt and template must ask for the form that they read); "
    "too low a model.sampling.temperature."
)


def no_signal(columns: Mapping[str, Points]) -> str:
    """A warning with the first such stretch of ``ROLLOUTS`` rollouts and likely causes; ``""`` if there is none."""
    first = length = 0
    for step, share in columns.get("frac_reward_zero_std", []):
        if share < 1.0:
            length = 0
            continue
        first = first if length else step
        length += 1
        if length >= ROLLOUTS:
            return f"No learning signal: the rewards of every group were equal from rollout {first} to {step}. {CAUSES}"
    return ""
