"""Runs of ``grpo-pl fit`` in processes of their own, and what they leave."""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import add, parser_of, publish, surroundings, write

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
GRPO_PL = (sys.executable, "-m", "grpo_pl")
SEEDED = ("seed_everything", "model.policy.init_seed", "model.cold_start.seed", "data.source.init_args.seed")
"""Options of a run that have a seed, from its first weights to its problems."""


class Run(NamedTuple):
    """A run that has ended."""

    folder: Path
    """Its run folder."""
    seconds: float
    """Of the whole command."""
    cpu_seconds: float
    """Of all its processes."""

    def rows(self, key: str) -> list[dict[str, str]]:
        return metric_rows(self.folder, key)


def seeds_of(seed: int, names: tuple[str, ...] = SEEDED) -> list[str]:
    return [f"--{name}={seed}" for name in names]


def fit(
    config: Path | str,
    folder: Path,
    *options: str,
    name: str = "run",
    cache: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """One ``grpo-pl fit``, cold start included.

    Args:
        folder: of its run folder.
        cache: where cold starts are kept; by default a folder of its own, which is empty at first.
        variables: further ones of its environment.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [*GRPO_PL, "fit", f"--config={config}", f"--runs_dir={folder}", f"--name={name}", *options]
    environment = {**os.environ, "GRPO_PL_CACHE": str(cache or folder / "cache"), **(variables or {})}
    start, used = time.perf_counter(), cpu_seconds()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return Run(folder / name, time.perf_counter() - start, cpu_seconds() - used)


def record_seeds(
    description: str | None, benchmark: str, run: Callable[[int, Path, list[str]], dict[str, Any]]
) -> None:
    """The command of a benchmark that makes one run for each of ``--seeds``, and hands further options on.

    Args:
        run: of a seed, in an empty folder and with these options; what it found.
    """
    parser = parser_of(description)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, options = parser.parse_known_args()
    record: dict[str, Any] = {"benchmark": benchmark, **surroundings("cpu"), "options": options, "runs": []}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            add(run(seed, Path(folder), options), record["runs"])
        # of the largest process of all runs, which is a training process
        record["peak_gib"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2)
        write(record, arguments.output)
    publish(record, arguments.output)


def cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def metric_rows(run: Path, key: str) -> list[dict[str, str]]:
    """The rows of a run's ``metrics.csv`` that have a value of ``key``."""
    with (run / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get(key)]


def numbers(rows: list[dict[str, str]], key: str, digits: int = 4) -> list[float]:
    """One column of rows, without empty cells."""
    return [round(float(row[key]), digits) for row in rows if row.get(key)]
