"""Draws right answers to the three sets of GSM-Symbolic's held-out problems: before training, on the way, at the end.

Run ``python docs/plots/gsm_symbolic.py RECORD.json …`` with records of ``benchmarks/gsm_symbolic.py`` and
``benchmarks/gsm_trials.py``; writes ``docs/images/gsm_symbolic.png``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SETS = {
    "numbers": "templates of training, new numbers",
    "templates": "templates never trained on",
    "originals": "their originals in GSM8K",
}
STAGES = ("untrained", "cold start", "GRPO")
"""Of a run of the recipe: before all, before its first rollout, after its last."""
RECIPE, TRIAL = "#0072b2", "#d55e00"
LEGEND = {RECIPE: "the recipe, a point for each seed", TRIAL: "a trial, at its end, one seed"}
APART = 0.18
"""Between the points of two runs at one place of the x axis."""

Shares = Mapping[str, tuple[float, float, float]]
"""Set -> share of right answers, with the ends of its 95 % interval."""


def places(runs: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[str, Shares]]]:
    """Place on the x axis -> colour and shares of each run that has a point there."""
    found: dict[str, list[tuple[str, Shares]]] = {stage: [] for stage in STAGES}
    for run in runs:
        first, last = run["rollouts"][0], run["rollouts"][-1]
        if "trial" in run:
            found.setdefault(run["trial"].replace("_", "\n"), []).append((TRIAL, last))
        else:
            for stage, shares in zip(STAGES, (run["before"], first, last), strict=True):
                found[stage].append((RECIPE, shares))
    return found


def draw(axis: Axes, name: str, at: Mapping[str, list[tuple[str, Shares]]]) -> None:
    for place, points in enumerate(at.values()):
        for number, (colour, shares) in enumerate(points):
            value, low, high = shares[name]
            x = place + APART * (number - (len(points) - 1) / 2)
            axis.errorbar(x, value, [[value - low], [high - value]], fmt="o", color=colour, markersize=4, linewidth=1)
    axis.set_xticks(range(len(at)), list(at), fontsize=7)
    axis.set_title(SETS[name], loc="left", fontsize=9)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "gsm_symbolic.png")
    arguments = parser.parse_args()
    at = places(run for record in arguments.records for run in json.loads(record.read_text())["runs"])
    figure, axes = plt.subplots(1, len(SETS), figsize=(12, 3), layout="constrained", sharey=True)
    for axis, name in zip(axes, SETS, strict=True):
        draw(axis, name, at)
    for colour, told in LEGEND.items():
        axes[-1].errorbar([], [], fmt="o", color=colour, markersize=4, label=told)
    axes[-1].legend(frameon=False, fontsize=8, loc="upper right")
    axes[0].set_ylabel("right answers, sampled, with 95 % intervals", fontsize=8)
    axes[0].set_ylim(bottom=-0.01)
    figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
