"""Tasks of reasoning-gym as `grpo-pl new` writes them, no field set by hand: held-out answers before and after GRPO.

Each run is a new folder, `grpo-pl new` and `grpo-pl fit` with an empty cache, so that the time includes the cold start.
A finished run enters the record at once; a run that is there is not made again, unless it failed.

    python benchmarks/tasks.py --output benchmarks/results/tasks.json
    python benchmarks/tasks.py --output benchmarks/results/tasks.json --table
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from common import processor

TASKS = (
    "gcd",
    "number_sorting",
    "count_bits",
    "string_insertion",
    "simple_equations",
    "spell_backward",
    "letter_counting",
    "chain_sum",
    "number_filtering",
    "leg_counting",
)
RISE, HIGH = 0.15, 0.95
"""A task counts as learned where held-out pass@1 rises by so much, or ends so high."""


def run(task: str, seed: int, folder: Path) -> dict[str, Any]:
    """One task with one seed, from nothing."""
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache")}
    program = [sys.executable, "-m", "grpo_pl"]
    seeds = [
        f"--seed_everything={seed}",
        f"--model.policy.init_seed={seed}",
        f"--model.cold_start.seed={seed}",
        f"--data.source.init_args.seed={seed}",
    ]
    before = _cpu_seconds()
    subprocess.run(
        [*program, "new", "learned", f"--from=reasoning_gym:{task}"],
        check=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    start = time.perf_counter()
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [*program, "fit", "--config=learned/config.yaml", *seeds],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    seconds = time.perf_counter() - start
    about = {
        "task": task,
        "seed": seed,
        "settings": _settings(folder / "learned" / "config.yaml"),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(_cpu_seconds() - before, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "load": round(os.getloadavg()[0], 1),
    }
    if done.returncode:
        return {**about, "error": " ".join((folder / "log").read_text().strip().splitlines()[-1:])[:200]}
    return {**about, **_figures(folder / "runs" / "learned")}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _settings(config: Path) -> dict[str, Any]:
    source = yaml.safe_load(config.read_text())["data"]["source"]
    settings: dict[str, Any] = source.get("init_args", {}).get("settings", {})
    return settings


def _figures(run_folder: Path) -> dict[str, Any]:
    with (run_folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    held_out = [row for row in rows if row.get("val/pass@1")]
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    shape = config["model"]["policy"]["from_scratch"]
    return {
        "width": shape["hidden_size"],
        "layers": shape["num_hidden_layers"],
        "cold_start_steps": config["model"]["cold_start"]["steps"],
        "lr": config["model"]["optimization"]["lr"],
        "rollouts": config["data"]["steps"],
        **{
            f"{name}_{place}": round(float(held_out[index][f"val/{name}"]), 4)
            for name in ("pass@1", "greedy")
            for place, index in (("before", 0), ("after", -1))
        },
    }


def learned(row: dict[str, Any]) -> bool:
    """Whether a run has reached what is asked of it."""
    return "error" not in row and (row["pass@1_after"] - row["pass@1_before"] >= RISE or row["pass@1_after"] >= HIGH)


def table(rows: list[dict[str, Any]]) -> str:
    """The runs as Markdown, in the order of ``TASKS``."""
    columns = ["task", "narrower than its own", "width", "cold start", "rollouts", "seed", "held-out pass@1", "learned"]
    lines = [f"| {' | '.join([*columns, 'threads', 's', 'CPU s'])} |", "|" + "---|" * (len(columns) + 3)]
    for row in sorted(rows, key=lambda row: (TASKS.index(row["task"]) if row["task"] in TASKS else 99, row["seed"])):
        settings = ", ".join(f"`{name}: {value}`" for name, value in row["settings"].items()) or "nothing"
        time_spent = [str(row["threads"]), f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}"]
        if "error" in row:
            cells = [f"`{row['task']}`", settings, "", "", "", str(row["seed"]), row["error"], "no", *time_spent]
        else:
            gain = f"{row['pass@1_before']:.3f} → {row['pass@1_after']:.3f}"
            shape = [str(row[name]) for name in ("width", "cold_start_steps", "rollouts", "seed")]
            cells = [f"`{row['task']}`", settings, *shape, gain, "yes" if learned(row) else "no", *time_spent]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, required=True, help="the record")
    parser.add_argument("--keep", type=Path, help="folder where the run folders stay")
    parser.add_argument("--table", action="store_true", help="only print the record as Markdown")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    for task in () if arguments.table else arguments.tasks:
        for seed in arguments.seeds:
            if any("error" not in row for row in _of(arguments.output, task, seed)):
                continue
            folder = Path(tempfile.mkdtemp(prefix=f"{task}-{seed}-", dir=arguments.keep))
            row = run(task, seed, folder)
            if arguments.keep is None:
                shutil.rmtree(folder)
            print(json.dumps(row), flush=True)
            failed = _of(arguments.output, task, seed)
            _write(arguments.output, [*(other for other in _runs(arguments.output) if other not in failed), row])
    print(table(_runs(arguments.output)))


def _runs(record: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(record.read_text())["runs"] if record.is_file() else []
    return runs


def _of(record: Path, task: str, seed: int) -> list[dict[str, Any]]:
    return [row for row in _runs(record) if (row["task"], row["seed"]) == (task, seed)]


def _write(record: Path, runs: list[dict[str, Any]]) -> None:
    about = {
        "benchmark": "tasks",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning", "reasoning-gym")},
    }
    record.write_text(json.dumps({**about, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
