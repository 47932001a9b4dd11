"""Trains a reward model on made-up pairs, and a policy towards it, with several seeds.

    python benchmarks/preferences.py --output benchmarks/results/preferences.json

Of each seed: the share of held-out pairs that the reward model agrees with, mean tokens of held-out answers before and
after the RL, and the lowest agreement on fresh held-out pairs during it, with what the watch warned of.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from runs import CONFIGS, GRPO_PL, SEEDED, metric_rows, numbers, record_seeds, seeds_of
from safetensors import safe_open

WATCH = "held-out pairs: the policy may have"


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Both fits of one seed, from nothing."""
    start = time.perf_counter()
    _fit("reward_model", folder, f"--model.classifier.init_seed={seed}", f"--data.pairs.init_args.seed={seed}")
    rewarded = time.perf_counter()
    export = folder / "reward_model" / "export"
    model = {"model": str(export), "activation": "sigmoid", "max_length": 128}
    rewards = [
        {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True, "weight": 0.2}},
        {"class_path": "grpo_pl.rewards.ModelReward", "init_args": model},
    ]
    seeds = seeds_of(seed, SEEDED[:3])
    told = _fit("preferences", folder, f"--model.rewards={json.dumps(rewards)}", *seeds, *extra)
    pairs = metric_rows(folder / "reward_model", "val/agreement")[-1]
    validated = metric_rows(folder / "preferences", "val/mean_length")
    fresh = metric_rows(folder / "preferences", "reward_model/agreement")
    with safe_open(export / "model.safetensors", framework="pt") as tensors:
        parameters = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 - no mapping
    return {
        "seed": seed,
        "seconds_reward_model": round(rewarded - start, 1),
        "seconds_policy": round(time.perf_counter() - rewarded, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "load": round(os.getloadavg()[0], 1),
        "parameters": parameters,
        "agreement": [round(float(pairs[f"val/agreement{end}"]), 4) for end in ("", "_low", "_high")],
        "mean_length": numbers(validated, "val/mean_length", 2),
        "pass@1": numbers(validated, "val/pass@1"),
        "fresh_agreement": numbers(fresh, "reward_model/agreement"),
        "watch_fired": WATCH in told,
    }


def _fit(config: str, folder: Path, *options: str) -> str:
    """What the fit told on its standard error."""
    program = [*GRPO_PL, "fit", f"--config={CONFIGS / config}.yaml", f"--runs_dir={folder}"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache")}
    done = subprocess.run([*program, *options], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{config}: {done.stderr[-2000:]}")
    return done.stderr


if __name__ == "__main__":
    record_seeds(__doc__, "preferences", run)
