"""Runs the sorting task with several seeds; records points and duration of 200 rollouts of 128 x 8 completions."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "sorting.yaml"
BAR = 6.0  # of 7 points; digits in order that ignore the prompt are worth about 4.6


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, float | int | None]:
    """Runs one `grpo-pl fit` in a new process."""
    seeds = [
        f"--seed_everything={seed}",
        f"--model.policy.init_seed={seed}",
        f"--data.source.init_args.seed={seed}",
    ]
    command = [sys.executable, "-m", "grpo_pl", "fit", f"--config={CONFIG}", f"--runs_dir={folder}", *seeds, *extra]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    with (folder / "sorting" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rewards = [float(row["reward"]) for row in rows if row.get("reward")]
    steps = sorted(float(row["step_time"]) for row in rows if row.get("step_time"))
    validation = [row for row in rows if row.get("val/pass@1")][-1]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "step_seconds_median": round(steps[len(steps) // 2], 3),
        "reward_first": round(rewards[0], 3),
        "reward_mean_last_10": round(fmean(rewards[-10:]), 3),
        "rollouts_to_bar": next((i + 1 for i, reward in enumerate(rewards) if reward >= BAR), None),
        "held_out_sorted_sampled": round(float(validation["val/pass@1"]), 3),
        "held_out_sorted_greedy": round(float(validation["val/greedy"]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments, extra = parser.parse_known_args()
    results = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(seed, Path(folder), extra))
        print(json.dumps(results[-1]), flush=True)
    record = {
        "benchmark": "sorting",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "load_average_at_the_end": [round(load, 1) for load in os.getloadavg()],  # what else the machine was doing
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning")},
        "runs": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
