"""Runs the configurations with environments, several seeds each; records held-out success and the whole duration."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from common import add, parser_of, publish, surroundings
from runs import CONFIGS, fit, numbers, seeds_of

TASKS = ("frozen_lake", "calculator", "guess_number", "black_box")


def run(task: str, seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Runs one `grpo-pl fit`, cold start included, in a new process with an empty cache."""
    done = fit(CONFIGS / f"{task}.yaml", folder, *seeds_of(seed), *extra)
    held_out = done.rows("val/pass@1")
    success, greedy = numbers(held_out, "val/pass@1", 3), numbers(held_out, "val/greedy", 3)
    turns = numbers(done.rows("episodes/mean_turns"), "episodes/mean_turns", 2)
    return {
        "task": task,
        "seed": seed,
        "seconds": round(done.seconds, 1),
        "cpu_seconds": round(done.cpu_seconds, 1),
        "success_before": success[0],
        "success_after": success[-1],
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "turns_of_the_first_rollout": turns[0],  # of the calculator: 1 + the share that calls it
        "turns_of_the_last_rollout": turns[-1],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, extra = parser.parse_known_args()
    record: dict[str, Any] = {"benchmark": "agents", **surroundings("cpu"), "runs": []}
    for task in arguments.tasks:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                add(run(task, seed, Path(folder), extra), record["runs"])
    record["load_after"] = [round(load, 2) for load in os.getloadavg()]
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
