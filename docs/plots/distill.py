"""Draws the curves of ``benchmarks/distill.py`` or ``self_distill.py``: held-out greedy answers over tokens, by seed.

Run ``python docs/plots/distill.py RECORD.json`` with its record; writes ``docs/images/distill.png``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {
    "whole distributions": "#0072b2",
    "self-distillation": "#0072b2",
    "sampled tokens": "#009e73",
    "GRPO alone": "#d55e00",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="record of one of the two")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "distill.png")
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text())
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for arm, colour in COLOURS.items():
        curves = [run[arm]["curve"] for run in record["runs"] if arm in run]
        for number, curve in enumerate(curves):
            tokens, greedy = zip(*curve, strict=True)
            label = arm if number == 0 else None
            axis.plot([t / 1000 for t in tokens], greedy, color=colour, marker=".", linewidth=1.2, label=label)
    axis.axhline(record["wanted_greedy"], color="0.4", linewidth=0.8, linestyle="--")
    axis.set_xlabel("thousand tokens sampled")
    axis.set_title("held-out greedy answers that are right", loc="left", fontsize=10)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
