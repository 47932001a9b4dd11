"""Trains a policy to search, with several seeds: held-out and training answers, length, and one problem over time.

Each run is `grpo-pl demo` in a new process with an empty cache, so that its time includes the cold start. A finished
run enters the record at once, and one that is there is not made again. Further options are those of `grpo-pl demo`.

    python benchmarks/search.py --output benchmarks/results/countdown-search.json
    python benchmarks/search.py --overlay configs/puzzle/subset_sum.yaml --output subset-sum-search.json
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser_of, read_runs, surroundings, write
from runs import GRPO_PL, SEEDED, metric_rows, numbers, seeds_of

CONFIG = "configs/countdown_search.yaml"
EDGE = 5
"""Rollouts whose mean stands for the beginning or the end of training."""
CURVES = {
    "correct": "completions/correct",
    "length": "completions/mean_length",
    "reflection_rate": "completions/reflection_rate",
}


def run(configs: list[str], seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One run with one seed, from nothing."""
    files = [f"--config={config}" for config in configs]
    program = [*GRPO_PL, "demo", *files, f"--seed={seed}", *seeds_of(seed, SEEDED[1:]), *extra, f"--runs_dir={folder}"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache"), "COLUMNS": "1000"}
    start = time.perf_counter()
    shown = subprocess.run(program, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    seconds = time.perf_counter() - start
    rows = {key: metric_rows(folder / "demo", key) for key in (*CURVES.values(), "val/pass@1")}
    curves = {name: numbers(rows[key], key) for name, key in CURVES.items()}
    steps = (int(row["step"]) for row in rows["val/pass@1"])
    held_out = [list(pair) for pair in zip(steps, numbers(rows["val/pass@1"], "val/pass@1"), strict=True)]
    ends = {
        f"{name}_{place}": round(statistics.fmean(values[part]), 4)
        for name, values in curves.items()
        for place, part in (("before", slice(EDGE)), ("after", slice(-EDGE, None)))
    }
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "load": round(os.getloadavg()[0], 1),
        "held_out_before": held_out[0][1],
        "held_out_after": held_out[-1][1],
        **ends,
        "gap_after": round(ends["correct_after"] - held_out[-1][1], 4),
        "held_out": held_out,
        "curves": curves,
        "answers": answers(shown),
    }


def answers(shown: str) -> dict[str, Any]:
    """The held-out problem that the demo shows, and what was answered after how many rollouts."""
    problem = re.search(r"^held-out problem (.*)$", shown, re.MULTILINE)
    found = re.findall(r"^rollout (\d+): (right|wrong): (\S.*?)(?: right [\d.]+ length [\d.]+)?$", shown, re.MULTILINE)
    return {
        "problem": problem.group(1) if problem else None,
        "answered": [
            {"rollout": int(rollout), "right": mark == "right", "text": text} for rollout, mark, text in found
        ],
    }


def main() -> None:
    parser = parser_of(__doc__, goes_on=True)
    parser.add_argument("--overlay", nargs="*", default=[], help=f"configurations on top of {CONFIG}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, extra = parser.parse_known_args()
    what = {"configs": [CONFIG, *arguments.overlay], "options": extra}
    if arguments.output.is_file():
        recorded = json.loads(arguments.output.read_text())
        if any(recorded.get(name, []) != value for name, value in what.items()):
            parser.error(f"{arguments.output} is a record of {recorded['configs']} with {recorded.get('options', [])}.")
    for seed in arguments.seeds:
        if seed in {each["seed"] for each in read_runs(arguments.output)}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run(what["configs"], seed, Path(folder), extra)
        short = {name: value for name, value in found.items() if not isinstance(value, dict | list)}
        print(json.dumps(short), flush=True)
        runs = sorted([*read_runs(arguments.output), found], key=lambda each: each["seed"])
        write({"benchmark": "search", **what, **surroundings("cpu"), "runs": runs}, arguments.output)


if __name__ == "__main__":
    main()
