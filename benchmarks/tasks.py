"""Twelve tasks as `grpo-pl new` writes them, no field set by hand: held-out answers before and after GRPO.

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
import random
import re
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

TASKS = {
    **{
        f"reasoning_gym:{task}": None
        for task in (
            "gcd",
            "lcm",
            "simple_equations",
            "chain_sum",
            "base_conversion",
            "caesar_cipher",
            "count_bits",
            "letter_counting",
            "leg_counting",
        )
    },
    "csv:currency": 1000,
    "csv:second_largest": 2000,
    "gymnasium:CartPole-v1": None,
}
"""What a task is made of -> the rows of its file, where it is one."""
LOWEST, HIGHEST, RISE, END = 0.05, 0.70, 0.20, 0.50
"""A task counts as learned where held-out pass@1 begins between the first two, rises by the third and ends at the
last, or above."""


def currency(rng: random.Random) -> tuple[str, str]:
    """An amount by a rate that the question states."""
    first, second = rng.sample(["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "PLN", "INR"], 2)
    amount, rate = rng.randint(2, 20), rng.randint(2, 9)
    asked = rng.choice(
        [
            f"How many {second} are {amount} {first}? (1 {first} = {rate} {second})",
            f"1 {first} is {rate} {second}. What do I get for {amount} {first}?",
            f"At {rate} {second} to the {first}, change {amount} {first}.",
        ]
    )
    return asked, str(amount * rate)


def second_largest(rng: random.Random) -> tuple[str, str]:
    """Three or four numbers in a sentence."""
    numbers = rng.sample(range(10, 100), rng.choice([3, 4]))
    names = rng.sample(["Ann", "Bob", "Cem", "Eve", "Ida", "Leo", "Mia", "Tom"], len(numbers))
    *parts, last = [f"{name} has {number}" for name, number in zip(names, numbers, strict=True)]
    thing = rng.choice(["nuts", "pens", "cards", "coins"])
    return f"{', '.join(parts)} and {last} {thing}: which is the second largest?", str(sorted(numbers)[-2])


MAKERS = {"csv:currency": currency, "csv:second_largest": second_largest}


def origin(task: str, rows: int | None, folder: Path) -> str:
    """What `grpo-pl new --from` is given; writes a file of rows with different questions."""
    if task not in MAKERS:
        return task
    rng = random.Random(task)
    made: dict[str, str] = {}
    while len(made) < (rows or 0):
        question, answer = MAKERS[task](rng)
        made[question] = answer
    file = folder / f"{task.partition(':')[2]}.csv"
    with file.open("w", newline="") as opened:
        table = csv.writer(opened)
        table.writerow(["question", "answer"])
        table.writerows(made.items())
    return f"csv:{file}"


def run(task: str, seed: int, folder: Path, rows: int | None, minutes: float) -> dict[str, Any]:
    """One task with one seed, from nothing."""
    environment = {**os.environ, "GRPO_PL_CACHE": str(folder / "cache")}
    program = [sys.executable, "-m", "grpo_pl"]
    seeds = [
        f"--seed_everything={seed}",
        f"--model.policy.init_seed={seed}",
        f"--model.cold_start.seed={seed}",
        f"--data.source.init_args.seed={seed}",
    ]
    before, asked = _cpu_seconds(), time.perf_counter()
    made = subprocess.run(
        [*program, "new", "learned", f"--from={origin(task, rows, folder)}", f"--minutes={minutes:g}"],
        check=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
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
        **({} if rows is None else {"rows": rows}),
        "minutes": minutes,
        "said_by_new": made.stdout.strip().splitlines(),
        "seconds_of_new": round(start - asked, 1),
        "settings": _settings(folder / "learned" / "config.yaml"),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(_cpu_seconds() - before, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "load": round(os.getloadavg()[0], 1),
    }
    if done.returncode:
        return {**about, "error": " ".join((folder / "log").read_text().strip().splitlines()[-1:])[:200]}
    said = [line for line in (folder / "log").read_text().splitlines() if MARKED.match(line)]
    return {**about, **_figures(folder / "runs" / "learned"), "said": said}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _settings(config: Path) -> dict[str, Any]:
    source = yaml.safe_load(config.read_text())["data"]["source"]
    settings: dict[str, Any] = source.get("init_args", {}).get("settings", {})
    return settings


MARKED = re.compile(r"After \d+ of \d+ rollouts|D\d\d ")
"""Lines of a run about its learning."""


def _figures(run_folder: Path) -> dict[str, Any]:
    with (run_folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    held_out = [row for row in rows if row.get("val/pass@1")]
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    shape = config["model"]["policy"]["from_scratch"]
    trained = [float(row["rewards/right/mean"]) for row in rows if row.get("rewards/right/mean")]
    return {
        "training_after": round(sum(trained[-5:]) / 5, 4),
        "prompts": config["data"]["prompts_per_step"],
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
    if "error" in row:
        return False
    before, after = row["pass@1_before"], row["pass@1_after"]
    return bool(LOWEST <= before <= HIGHEST and after - before >= RISE and after >= END)


def table(rows: list[dict[str, Any]]) -> str:
    """The runs as Markdown, in the order of ``TASKS``."""
    places = {task: place for place, task in enumerate(TASKS)}
    columns = ["task", "settings", "width", "cold start", "rollouts", "seed", "held-out pass@1", "learned"]
    lines = [f"| {' | '.join([*columns, 'minutes', 'CPU s'])} |", "|" + "---|" * (len(columns) + 2)]
    for row in sorted(rows, key=lambda row: (places.get(row["task"], 99), row.get("rows", 0), row["seed"])):
        settings = ", ".join(f"`{name}: {value}`" for name, value in row["settings"].items())
        settings = f"{row['rows']:,} rows" if "rows" in row else settings or "its own"
        time_spent = [f"{row['minutes']:g}", f"{row['cpu_seconds']:.0f}"]
        name = f"`{row['task'].partition(':')[2]}`"
        if "error" in row:
            cells = [name, settings, "", "", "", str(row["seed"]), row["error"], "no", *time_spent]
        else:
            gain = f"{row['pass@1_before']:.3f} → {row['pass@1_after']:.3f}"
            shape = [str(row[key]) for key in ("width", "cold_start_steps")]
            drawn = f"{row['rollouts']} × {row['prompts']}"
            cells = [
                name,
                settings,
                *shape,
                drawn,
                str(row["seed"]),
                gain,
                "yes" if learned(row) else "no",
                *time_spent,
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, f"{sum(map(learned, rows))} of {len(rows)} runs learned."])


KEY = ("task", "seed", "minutes", "rows")
"""What makes two runs of a record the same."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=6.0, help="of `grpo-pl new`")
    parser.add_argument("--rows", type=int, help="of a file; by default as in TASKS")
    parser.add_argument("--output", type=Path, required=True, help="the record")
    parser.add_argument("--keep", type=Path, help="folder where the run folders stay")
    parser.add_argument("--table", action="store_true", help="only print the record as Markdown")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    for task in () if arguments.table else arguments.tasks:
        for seed in arguments.seeds:
            rows = (arguments.rows or TASKS[task]) if task.startswith("csv:") else None
            same = (task, seed, arguments.minutes, rows)
            there = [row for row in _runs(arguments.output) if tuple(map(row.get, KEY)) == same]
            if any("error" not in row for row in there):
                continue
            folder = Path(tempfile.mkdtemp(prefix=f"{task.replace(':', '-')}-{seed}-", dir=arguments.keep))
            row = run(task, seed, folder, rows, arguments.minutes)
            if arguments.keep is None:
                shutil.rmtree(folder)
            print(json.dumps(row), flush=True)
            _write(arguments.output, [*(other for other in _runs(arguments.output) if other not in there), row])
    print(table(_runs(arguments.output)))


def _runs(record: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(record.read_text())["runs"] if record.is_file() else []
    return runs


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
