"""Draws how a pretrained model learns word problems over time: right answers to three sets of held-out problems.

Run ``python docs/plots/real.py RECORD.json …`` with records of ``benchmarks/real.py curve`` and of several seeds of
``configs/smollm2.yaml``; writes ``docs/images/real.png``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CONTENDERS = {"ours": ("grpo_pl", "#0072b2"), "trl_tuned": ("TRL, tuned", "#d55e00")}
SETS = {
    "numbers": ("val/pass@1", "unseen numbers"),
    "wordings": ("val/wordings/pass@1", "unseen wordings"),
    "two_step": ("val/two_step/pass@1", "two steps"),
}
"""Set -> its metric in a run, and its title."""

Point = dict[str, float]
"""``minutes`` of training, number of ``problems``, and the share of right answers by set."""


def read(records: Sequence[Path], seeds: Sequence[int]) -> list[tuple[str, list[Point]]]:
    """Contender and points of each run; of the recipe those of ``seeds``."""
    runs = [run for record in records for run in json.loads(record.read_text())["runs"]]
    return [
        (run["contender"], of_curve(run)) if "points" in run else ("ours", of_recipe(run))
        for run in runs
        if "points" in run or run["seed"] in seeds
    ]


def of_curve(run: Mapping[str, Any]) -> list[Point]:
    """Points of a run of ``benchmarks/real.py curve``."""
    return [
        {
            "minutes": point["seconds"] / 60,
            "problems": point["numbers"]["problems"],
            **{name: point[name]["right"] for name in SETS},
        }
        for point in run["points"]
    ]


def of_recipe(run: Mapping[str, Any]) -> list[Point]:
    """Points of a run of the recipe: of 100 problems on the way, of 400 at the end."""
    seconds = [0.0, *accumulate(run["step_time"])]
    steps = [step for step, _ in run["held_out_100"]["val/pass@1"]]
    points = [
        {
            "minutes": seconds[step] / 60,
            "problems": 100,
            **{name: run["held_out_100"][metric][i][1] for name, (metric, _) in SETS.items()},
        }
        for i, step in enumerate(steps)
    ]
    at_the_end = {name: run["after_400"][metric][0] for name, (metric, _) in SETS.items()}
    return [*points[:-1], {**points[-1], "problems": 400, **at_the_end}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 2], help="runs of the recipe whose times count")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "real.png")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, len(SETS), figsize=(10, 3), layout="constrained", sharey=True)
    for axis, (name, (_, title)) in zip(axes, SETS.items(), strict=True):
        drawn: set[str] = set()
        for contender, points in read(arguments.records, arguments.seeds):
            label, colour = CONTENDERS[contender]
            x, y = [point["minutes"] for point in points], [point[name] for point in points]
            axis.plot(x, y, color=colour, linewidth=1.4, label=None if label in drawn else label)
            sizes = [34 if point["problems"] >= 400 else 9 for point in points]
            axis.scatter(x, y, sizes, color=colour, zorder=3)
            drawn.add(label)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("minutes of training", fontsize=9)
        axis.set_ylim(0.5, 1.01)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("right answers, sampled", fontsize=9)
    axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    told = "each line: 60 rollouts of 64\nlarge dots: 400 problems\nsmall dots: 100 problems"
    axes[1].annotate(told, (0.98, 0.03), xycoords="axes fraction", ha="right", fontsize=8, color="#555555")
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
