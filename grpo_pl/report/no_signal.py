"""A run without a learning signal: what that is, why it happens, and where a run's metrics show it."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_pl.evaluation.curves import Points

ROLLOUTS = 10
"""Rollouts in a row in which every group has equal rewards."""
CAUSES = (
    "Likely causes: problems too hard or too easy for the policy (grpo-pl filter, a cold start, another model); "
    "completions cut off before their answer (completions/clipped_ratio, model.sampling.max_completion_length); "
    "rewards that find no answer (read completions.jsonl: prompt and template must ask for the form that they read); "
    "too low a model.sampling.temperature."
)


def no_signal(columns: Mapping[str, Points]) -> str:
    """One sentence for the page if metrics show so long a stretch, else nothing."""
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
