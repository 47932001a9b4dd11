"""Trains a policy to count drawn shapes, with several seeds: held-out answers before and after GRPO, and seconds.

Each run is `configs/shapes.yaml` in a new process with an empty cache, so that its time includes the cold start. Beside
other images it answers images with pairs of colour and shape that training never has, and images of other problems, of
which nobody can be right more often than the most frequent answer.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from runs import CONFIGS, SEEDED, fit, numbers, record_seeds, seeds_of

from grpo_pl.data.tasks.shapes import ShapePrompts

SETS = {"images": "val", "combinations": "val/combinations", "permuted": "val/permuted"}
"""Name in the record -> where the metrics of a set begin."""
SEEDS = (*SEEDED, *(f"data.validation_sets.{name}.init_args.seed" for name in ("combinations", "permuted")))


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Runs one `grpo-pl fit` in a new process."""
    done = fit(CONFIGS / "shapes.yaml", folder, *seeds_of(seed, SEEDS), *extra)
    found: dict[str, Any] = {"seed": seed, "seconds": round(done.seconds, 1), "cpu_seconds": round(done.cpu_seconds, 1)}
    for name, metric in SETS.items():
        for kind in ("pass@1", "greedy"):
            values = numbers(done.rows(f"{metric}/{kind}"), f"{metric}/{kind}")
            found[f"{name}_{kind}"] = {"before": values[0], "after": values[-1]}
    answers = [problem.answer for problem in ShapePrompts(questions=("count",), seed=seed).validation()]
    found["most_frequent_answer"] = Counter(answers).most_common(1)[0][1] / len(answers)
    return found


if __name__ == "__main__":
    record_seeds(__doc__, "shapes", run)
