"""Tasks as `grpo-pl new --policy scratch` writes them, no field set by hand: held-out answers before and after GRPO.

Each run is a new folder, `grpo-pl new` and `grpo-pl fit` with an empty cache, so that the time includes the cold start.
A finished run enters the record at once; a run that is there is not made again, unless it failed.

    python benchmarks/tasks.py --output benchmarks/results/tasks.json
    python benchmarks/tasks.py --output benchmarks/results/tasks.json --table
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import parser_of, read_runs, surroundings, write
from runs import GRPO_PL, cpu_seconds, metric_rows, numbers, seeds_of

TASKS = {
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
    before, asked = cpu_seconds(), time.perf_counter()
    about_task = [f"--from={origin(task, rows, folder)}", "--policy=scratch", f"--minutes={minutes:g}"]
    made = subprocess.run(
        [*GRPO_PL, "new", "learned", *about_task],
        check=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    start = time.perf_counter()
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [*GRPO_PL, "fit", "--config=learned/config.yaml", *seeds_of(seed)],
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
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds() - before, 1),
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
        "load": round(os.getloadavg()[0], 1),
    }
    if done.returncode:
        return {**about, "error": " ".join((folder / "log").read_text().strip().splitlines()[-1:])[:200]}
    said = [line for line in (folder / "log").read_text().splitlines() if MARKED.match(line)]
    return {**about, **_figures(folder / "runs" / "learned"), "said": said}


MARKED = re.compile(r"After \d+ of \d+ rollouts|D\d\d ")
"""Lines of a run about its learning."""


def _figures(run_folder: Path) -> dict[str, Any]:
    held_out = metric_rows(run_folder, "val/pass@1")
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    shape = config["model"]["policy"]["from_scratch"]
    trained = numbers(metric_rows(run_folder, "rewards/right/mean"), "rewards/right/mean", 9)
    return {
        "training_after": round(sum(trained[-5:]) / 5, 4),
        "prompts": config["data"]["prompts_per_step"],
        "width": shape["hidden_size"],
        "layers": shape["num_hidden_layers"],
        "cold_start_steps": config["model"]["cold_start"]["steps"],
        "lr": config["model"]["optimization"]["lr"],
        "rollouts": config["data"]["steps"],
        **{
            f"{name}_{place}": numbers(held_out, f"val/{name}")[index]
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
    columns = ["task", "rows", "width", "cold start", "rollouts", "seed", "held-out pass@1", "learned"]
    lines = [f"| {' | '.join([*columns, 'minutes', 'CPU s'])} |", "|" + "---|" * (len(columns) + 2)]
    for row in sorted(rows, key=lambda row: (places.get(row["task"], 99), row.get("rows", 0), row["seed"])):
        rows_of = f"{row['rows']:,}" if "rows" in row else "–"
        time_spent = [f"{row['minutes']:g}", f"{row['cpu_seconds']:.0f}"]
        name = f"`{row['task'].partition(':')[2]}`"
        shape, found = ["", "", ""], row.get("error", "")
        if "error" not in row:
            shape = [str(row["width"]), str(row["cold_start_steps"]), f"{row['rollouts']} × {row['prompts']}"]
            found = f"{row['pass@1_before']:.3f} → {row['pass@1_after']:.3f}"
        end = "yes" if learned(row) else "no"
        lines.append(f"| {' | '.join([name, rows_of, *shape, str(row['seed']), found, end, *time_spent])} |")
    return "\n".join([*lines, f"{sum(map(learned, rows))} of {len(rows)} runs learned."])


KEY = ("task", "seed", "minutes", "rows")
"""What makes two runs of a record the same."""


def main() -> None:
    parser = parser_of(__doc__, goes_on=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=6.0, help="of `grpo-pl new`")
    parser.add_argument("--rows", type=int, help="of a file; by default as in TASKS")
    parser.add_argument("--keep", type=Path, help="folder where the run folders stay")
    parser.add_argument("--table", action="store_true", help="only print the record as Markdown")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    for task in () if arguments.table else arguments.tasks:
        for seed in arguments.seeds:
            rows = (arguments.rows or TASKS[task]) if task.startswith("csv:") else None
            same = (task, seed, arguments.minutes, rows)
            there = [row for row in read_runs(arguments.output) if tuple(map(row.get, KEY)) == same]
            if any("error" not in row for row in there):
                continue
            folder = Path(tempfile.mkdtemp(prefix=f"{task.replace(':', '-')}-{seed}-", dir=arguments.keep))
            row = run(task, seed, folder, rows, arguments.minutes)
            if arguments.keep is None:
                shutil.rmtree(folder)
            print(json.dumps(row), flush=True)
            runs = [*(other for other in read_runs(arguments.output) if other not in there), row]
            write({"benchmark": "tasks", **surroundings("cpu"), "runs": runs}, arguments.output)
    print(table(read_runs(arguments.output)))


if __name__ == "__main__":
    main()
