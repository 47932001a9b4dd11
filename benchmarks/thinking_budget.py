"""The search demo with thinking budgets: right answers and tokens of held-out problems, for each budget and seed.

All fits of a seed begin from one cold start. Budget 0 is none, ``16-64`` a range that completions draw from. Behind a
thought that its budget ended there is room for the answer alone: with more, the policy learns to go on searching there.
A finished fit enters the record at once, and one that is there is not made again.

    OMP_NUM_THREADS=1 python benchmarks/thinking_budget.py --budgets 0 64 48 --output thinking-budget.json
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import add, parser_of, read_runs, surroundings, write
from runs import fit, seeds_of

CONFIG = "configs/countdown_search.yaml"
ANSWER = 20
"""Tokens of the longest answer, with its tags and the end."""
KEYS = ("val/pass@1", "val/greedy", "val/mean_length")


def run(budget: str, seed: int, cache: Path, extra: list[str]) -> dict[str, Any]:
    """One fit; its validations as [rollout, value] by key."""
    options = [*seeds_of(seed), *extra]
    if budget != "0":
        low, _, high = budget.partition("-")
        options += [
            f"--model.sampling.thinking_budget={f'[{low},{high}]' if high else low}",
            f"--model.sampling.max_completion_length={int(high or low) + ANSWER}",
        ]
    with tempfile.TemporaryDirectory() as folder:
        done = fit(CONFIG, Path(folder), *options, cache=cache)
        validated = done.rows(KEYS[0])
    found = {key: [[int(row["step"]), round(float(row[key]), 4)] for row in validated] for key in KEYS}
    return {"seed": seed, "budget": budget, "seconds": round(done.seconds, 1), **found}


def main() -> None:
    parser = parser_of(__doc__, goes_on=True)
    parser.add_argument("--budgets", nargs="+", default=["0", "64", "48"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, help="keeps the cold starts here; else they are made anew")
    arguments, extra = parser.parse_known_args()
    runs = read_runs(arguments.output)
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for budget in arguments.budgets:
                if any((each["seed"], each["budget"]) == (seed, budget) for each in runs):
                    continue
                add(run(budget, seed, arguments.cache or Path(folder), extra), runs)
                about = {"benchmark": "thinking_budget", "config": CONFIG, "options": extra}
                write({**about, **surroundings("cpu"), "runs": runs}, arguments.output)


if __name__ == "__main__":
    main()
