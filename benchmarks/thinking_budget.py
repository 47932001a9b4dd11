"""The search demo with thinking budgets: right answers and tokens of held-out problems, for each budget and seed.

All fits of a seed begin from one cold start. Budget 0 is none, ``16-64`` a range that completions draw from. Behind a
thought that its budget ended there is room for the answer alone: with more, the policy learns to go on searching there.
A finished fit enters the record at once, and one that is there is not made again.

    OMP_NUM_THREADS=1 python benchmarks/thinking_budget.py --budgets 0 64 48 --output thinking-budget.json
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

CONFIG = "configs/countdown_search.yaml"
ANSWER = 20
"""Tokens of the longest answer, with its tags and the end."""
KEYS = ("val/pass@1", "val/greedy", "val/mean_length")


def fit(budget: str, seed: int, cache: Path, extra: list[str]) -> dict[str, Any]:
    """One fit; its validations as [rollout, value] by key."""
    seeds = [f"--{place}={seed}" for place in ("seed_everything", "model.policy.init_seed", "model.cold_start.seed")]
    options = [*seeds, f"--data.source.init_args.seed={seed}", *extra]
    if budget != "0":
        low, _, high = budget.partition("-")
        options += [
            f"--model.sampling.thinking_budget={f'[{low},{high}]' if high else low}",
            f"--model.sampling.max_completion_length={int(high or low) + ANSWER}",
        ]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        program = [sys.executable, "-m", "grpo_pl", "fit", f"--config={CONFIG}", f"--runs_dir={runs}", "--name=run"]
        environment = {**os.environ, "GRPO_PL_CACHE": str(cache)}
        subprocess.run([*program, *options], check=True, env=environment, stdout=subprocess.DEVNULL)
        with (Path(runs) / "run" / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    validated = [row for row in rows if row.get(KEYS[0])]
    found = {key: [[int(row["step"]), round(float(row[key]), 4)] for row in validated] for key in KEYS}
    return {"seed": seed, "budget": budget, "seconds": round(time.perf_counter() - start, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", default=["0", "64", "48"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, help="keeps the cold starts here; else they are made anew")
    parser.add_argument("--output", type=Path, required=True, help="the record")
    arguments, extra = parser.parse_known_args()
    runs = json.loads(arguments.output.read_text())["runs"] if arguments.output.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for budget in arguments.budgets:
                if any((run["seed"], run["budget"]) == (seed, budget) for run in runs):
                    continue
                runs.append(fit(budget, seed, arguments.cache or Path(folder), extra))
                print(json.dumps(runs[-1]), flush=True)
                about = {"benchmark": "thinking_budget", "config": CONFIG, "options": extra}
                record = {**about, **surroundings("cpu"), "runs": runs}
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
