"""Runs the configurations with environments, several seeds each; records held-out success and the whole duration."""

from __future__ import annotations

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import publish, surroundings

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TASKS = ("frozen_lake", "calculator", "guess_number", "black_box")


def run(task: str, seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Runs one `grpo-pl fit`, cold start included, in a new process with an empty cache."""
    seeds = [
        f"--seed_everything={seed}",
        f"--model.policy.init_seed={seed}",
        f"--model.cold_start.seed={seed}",
        f"--data.source.init_args.seed={seed}",
    ]
    given = [f"--config={CONFIGS / task}.yaml", f"--runs_dir={folder}", f"--name={task}"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache")}
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "grpo_pl", "fit", *given, *seeds, *extra],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / task / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    held_out = [row for row in rows if row.get("val/pass@1")]
    turns = [float(row["episodes/mean_turns"]) for row in rows if row.get("episodes/mean_turns")]
    return {
        "task": task,
        "seed": seed,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
        "success_before": round(float(held_out[0]["val/pass@1"]), 3),
        "success_after": round(float(held_out[-1]["val/pass@1"]), 3),
        "greedy_before": round(float(held_out[0]["val/greedy"]), 3),
        "greedy_after": round(float(held_out[-1]["val/greedy"]), 3),
        "turns_of_the_first_rollout": round(turns[0], 2),  # of the calculator: 1 + the share that calls it
        "turns_of_the_last_rollout": round(turns[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments, extra = parser.parse_known_args()
    record = {"benchmark": "agents", **surroundings("cpu"), "runs": []}
    for task in arguments.tasks:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                record["runs"].append(run(task, seed, Path(folder), extra))
            print(record["runs"][-1], flush=True)
    record["load_after"] = [round(load, 2) for load in os.getloadavg()]
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
