"""Runs the quickstart with several seeds; records accuracy, duration of the whole command and peak memory."""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from common import processor

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, float]:
    """Runs one `grpo-pl fit`, cold start included, in a new process with an empty cache."""
    seeds = [
        f"--seed_everything={seed}",
        f"--model.policy.init_seed={seed}",
        f"--model.cold_start.seed={seed}",
        f"--data.source.init_args.seed={seed}",
    ]
    command = [sys.executable, "-m", "grpo_pl", "fit", f"--config={CONFIG}", f"--runs_dir={folder}", *seeds, *extra]
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache")}
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    with (folder / "quickstart" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/pass@1")]
    with (folder / "quickstart" / "metrics.csv").open(newline="") as file:
        steps = [float(row["step_time"]) for row in csv.DictReader(file) if row.get("step_time")]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "seconds_in_steps": round(sum(steps), 1),
        "pass@1_before": float(rows[0]["val/pass@1"]),
        "pass@1_after": float(rows[-1]["val/pass@1"]),
        "greedy_before": float(rows[0]["val/greedy"]),
        "greedy_after": float(rows[-1]["val/greedy"]),
        "well_formed_at_the_end": round(well_formed(folder / "quickstart" / "completions.jsonl"), 4),
    }


def well_formed(completions: Path, rollouts: int = 20) -> float:
    """Share of the logged completions of the last rollouts for which the format reward is 1."""
    rows = [json.loads(line) for line in completions.read_text().splitlines()]
    last = max(row["step"] for row in rows)
    paid = [row["rewards"]["format"]["value"] == 1.0 for row in rows if row["step"] > last - rollouts]
    return sum(paid) / len(paid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments, extra = parser.parse_known_args()  # the others are options of the fit
    results = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(seed, Path(folder), extra))
        print(json.dumps(results[-1]), flush=True)
    record = {
        "benchmark": "quickstart",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning")},
        "options": extra,
        # of the largest process of all runs, which is the training process; reward workers are not included
        "peak_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "runs": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
