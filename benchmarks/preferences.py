"""Trains a reward model on made-up pairs, and a policy towards it, with several seeds.

    python benchmarks/preferences.py --output benchmarks/results/preferences.json

Of each seed: the share of held-out pairs that the reward model agrees with, mean tokens of held-out answers before and
after the RL, and the lowest agreement on fresh held-out pairs during it, with what the watch warned of.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import surroundings
from safetensors import safe_open

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
WATCH = "held-out pairs: the policy may have"


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Both fits of one seed, from nothing."""
    start = time.perf_counter()
    _fit("reward_model", folder, f"--model.classifier.init_seed={seed}", f"--data.pairs.init_args.seed={seed}")
    rewarded = time.perf_counter()
    export = folder / "reward_model" / "export"
    reward = {"class_path": "grpo_pl.rewards.ModelReward"}
    reward |= {"init_args": {"model": str(export), "activation": "sigmoid", "max_length": 128}}  # type: ignore[dict-item]
    judge = {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True, "weight": 0.2}}
    seeds = [f"--seed_everything={seed}", f"--model.policy.init_seed={seed}", f"--model.cold_start.seed={seed}"]
    told = _fit("preferences", folder, f"--model.rewards={json.dumps([judge, reward])}", *seeds, *extra)
    pairs = [row for row in _metrics(folder / "reward_model") if row.get("val/agreement")][-1]
    rows = _metrics(folder / "preferences")
    validated = [row for row in rows if row.get("val/mean_length")]
    fresh = [float(row["reward_model/agreement"]) for row in rows if row.get("reward_model/agreement")]
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
        "mean_length": [round(float(row["val/mean_length"]), 2) for row in validated],
        "pass@1": [round(float(row["val/pass@1"]), 4) for row in validated],
        "fresh_agreement": [round(value, 4) for value in fresh],
        "watch_fired": WATCH in told,
    }


def _fit(config: str, folder: Path, *options: str) -> str:
    """What the fit told on its standard error."""
    program = [sys.executable, "-m", "grpo_pl", "fit", f"--config={CONFIGS / config}.yaml", f"--runs_dir={folder}"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache")}
    done = subprocess.run([*program, *options], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{config}: {done.stderr[-2000:]}")
    return done.stderr


def _metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, required=True, help="the record")
    arguments, extra = parser.parse_known_args()
    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(seed, Path(folder), extra))
        print(json.dumps(runs[-1]), flush=True)
        record = {
            "benchmark": "preferences",
            "options": extra,
            **surroundings("cpu"),
            "runs": runs,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
