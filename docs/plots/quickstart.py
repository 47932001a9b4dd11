"""Draws what a run learned: reward, held-out answers, and the lengths of right and wrong completions.

Run ``python docs/plots/quickstart.py runs/quickstart`` after the main job; writes ``docs/images/quickstart.png``.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "reward": {"reward": "mean reward"},
    "held-out problems": {"val/greedy": "greedy", "val/pass@1": "pass@1, sampled"},
    "completion length (tokens)": {
        "completions/mean_length_correct": "right answers",
        "completions/mean_length_wrong": "wrong answers",
    },
}


def curves(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Metric name -> (rollout, value), where there is one."""
    points: dict[str, list[tuple[int, float]]] = {}
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            for name, value in row.items():
                if value:
                    points.setdefault(name, []).append((int(row["step"]), float(value)))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "quickstart.png")
    arguments = parser.parse_args()
    points = curves(arguments.run / "metrics.csv")
    figure, axes = plt.subplots(1, len(PANELS), figsize=(10, 2.8), layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name, label in names.items():
            x, y = zip(*points.get(name, [(0, float("nan"))]), strict=True)  # a short run may have no wrong answer
            axis.plot(x, y, label=label, marker="o" if name.startswith("val/") else "")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rollout", fontsize=9)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(fontsize=8)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
