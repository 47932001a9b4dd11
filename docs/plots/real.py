"""Draws the curves of ``benchmarks/real.py curve``: right answers to held-out problems over time and over tokens.

Run ``python docs/plots/real.py RECORD.json`` with its record, or with several; folders of runs of ``grpo-pl fit
--config configs/smollm2.yaml`` may stand beside them. Writes ``docs/images/real.png``.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CONTENDERS = {"ours": ("grpo_pl", "#0072b2"), "trl_tuned": ("TRL, tuned", "#d55e00")}
SETS = {
    "numbers": ("numbers never seen", "-"),
    "wordings": ("wordings never seen", "--"),
    "two_step": ("two steps", ":"),
}

Point = dict[str, float]
"""``minutes`` of training, ``tokens`` in thousands, and the share of right answers by set."""


def of_record(file: Path) -> list[tuple[str, list[Point]]]:
    """Contender and points of each run."""
    runs = json.loads(file.read_text())["runs"]
    return [
        (
            run["contender"],
            [
                {
                    "minutes": point["seconds"] / 60,
                    "tokens": point["tokens"] / 1000,
                    **{name: point[name]["right"] for name in SETS},
                }
                for point in run["points"]
            ],
        )
        for run in runs
    ]


def of_run(folder: Path) -> list[Point]:
    """Points of a run folder; its validations count no time."""
    points, seconds, tokens = [], 0.0, 0.0
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("step_time"):
                seconds, tokens = seconds + float(row["step_time"]), float(row["num_tokens"])
            if row.get("val/pass@1"):
                columns = {
                    "numbers": "val/pass@1",
                    **{name: f"val/{name}/pass@1" for name in SETS if name != "numbers"},
                }
                right = {name: float(row[column]) for name, column in columns.items()}
                points.append({"minutes": seconds / 60, "tokens": tokens / 1000, **right})
    return points


def read(places: Sequence[Path]) -> list[tuple[str, list[Point]]]:
    return [run for place in places for run in ([("ours", of_run(place))] if place.is_dir() else of_record(place))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", type=Path, nargs="+", help="records of benchmarks/real.py curve, and run folders")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "real.png")
    arguments = parser.parse_args()
    runs = read(arguments.places)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for axis, unit, label in zip(axes, ("minutes", "tokens"), ("minutes of training", "thousand tokens"), strict=True):
        drawn: set[str] = set()
        for contender, points in runs:
            name, colour = CONTENDERS[contender]
            for part, (meaning, style) in SETS.items():
                x, y = [point[unit] for point in points], [point[part] for point in points]
                legend = f"{name}: {meaning}"
                axis.plot(
                    x, y, style, color=colour, marker=".", linewidth=1.2, label=None if legend in drawn else legend
                )
                drawn.add(legend)
        axis.set_xlabel(label, fontsize=9)
        axis.set_ylim(0.5, 1.01)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title("right answers to held-out problems, sampled", loc="left", fontsize=10)
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
