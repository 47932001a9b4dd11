"""Draws what a policy that learns to search learned: right answers and length over rollouts, by seed.

Run ``python docs/plots/search.py RECORD.json`` with a record of ``benchmarks/search.py``; writes
``docs/images/search.png``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#0072b2", "#009e73", "#d55e00")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="record of benchmarks/search.py")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "search.png")
    arguments = parser.parse_args()
    runs = json.loads(arguments.record.read_text())["runs"]
    figure, (right, length) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for run, colour in zip(runs, COLOURS, strict=False):
        right.plot(run["curves"]["correct"], color=colour, linewidth=0.8, alpha=0.6)
        right.plot(*zip(*run["held_out"], strict=True), color=colour, marker="o", linewidth=1.4)
        length.plot(run["curves"]["length"], color=colour, linewidth=1.2, label=f"seed {run['seed']}")
    right.set_title("right answers: training (thin), held out (dots)", loc="left", fontsize=10)
    right.set_ylim(0, 1)
    length.set_title("tokens of a completion", loc="left", fontsize=10)
    length.set_ylim(0)
    length.legend(frameon=False, fontsize=8)
    for axis in (right, length):
        axis.set_xlabel("rollout", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
