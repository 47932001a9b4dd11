"""Runs the sorting task with several seeds; records points and duration of 200 rollouts of 128 x 8 completions."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median_high
from typing import Any

from runs import CONFIGS, SEEDED, fit, numbers, record_seeds, seeds_of

BAR = 6.0  # of 7 points; digits in order that ignore the prompt are worth about 4.6


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Runs one `grpo-pl fit` in a new process."""
    seeds = seeds_of(seed, tuple(name for name in SEEDED if "cold_start" not in name))
    done = fit(CONFIGS / "sorting.yaml", folder, *seeds, *extra)
    rewards = numbers(done.rows("reward"), "reward")
    validation = done.rows("val/pass@1")[-1:]
    return {
        "seed": seed,
        "seconds": round(done.seconds, 1),
        "step_seconds_median": median_high(numbers(done.rows("step_time"), "step_time", 3)),
        "reward_first": round(rewards[0], 3),
        "reward_mean_last_10": round(fmean(rewards[-10:]), 3),
        "rollouts_to_bar": next((i + 1 for i, reward in enumerate(rewards) if reward >= BAR), None),
        "held_out_sorted_sampled": numbers(validation, "val/pass@1", 3)[0],
        "held_out_sorted_greedy": numbers(validation, "val/greedy", 3)[0],
    }


if __name__ == "__main__":
    record_seeds(__doc__, "sorting", run)
