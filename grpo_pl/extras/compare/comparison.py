"""Compares the metrics of several runs: one CSV file, a table, and a PNG with their curves."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from grpo_pl.evaluation.curves import Points
from grpo_pl.files.writing import staged

CURVES = {
    "reward": "reward",
    "length_correct": "completions/mean_length_correct",
    "length_wrong": "completions/mean_length_wrong",
    "kl": "kl",
    "entropy": "entropy",
}
"""Column of the comparison's CSV -> column of a run's ``metrics.csv``."""
PANELS = {
    "reward": ["reward"],
    "tokens per completion": ["length_correct", "length_wrong"],
    "KL to the reference, per token": ["kl"],
    "entropy, nats per token": ["entropy"],
}
"""Heading of a panel -> its curves."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""The colours of Okabe and Ito (2008), which colour-blind readers can tell apart."""
SOLID, DASHED, DOTTED = (0.0, ()), (0.0, (5.0, 2.0)), (0.0, (1.0, 1.5))
Runs = Mapping[str, Mapping[str, Points]]
"""Name of a run -> its columns, from `read_curves`."""


def write_curves(path: Path, runs: Runs) -> None:
    """One row per run and rollout: ``algorithm, rollout, reward, …``; cells without a value are empty."""
    with staged(path) as staging, staging.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "rollout", *CURVES])
        for algorithm, run in runs.items():
            curves = [dict(run.get(column, [])) for column in CURVES.values()]
            for rollout in sorted({step for curve in curves for step in curve}):
                writer.writerow([algorithm, rollout, *(curve.get(rollout, "") for curve in curves)])


def results_table(runs: Runs) -> Table:
    """First and last held-out pass@1 of each run, the mean of each curve over its last fifth, and the median time of a
    step; fits a terminal of 80 columns, and with the seconds that a teacher takes in a step one of 90.

    Where no run has a reward that says what is right, the held-out reward takes the place of pass@1; where some have,
    the caption has the held-out rewards of the others. It also has the held-out completions that could not be judged,
    if there are any.
    """
    last = {name: run["val/unjudged"][-1][1] for name, run in runs.items() if "val/unjudged" in run}
    unjudged = [f"{name}: {count:.0f}" for name, count in last.items() if count]
    rewarded = {name: run["val/reward"] for name, run in runs.items() if "val/reward" in run}
    measured = "val/reward" if rewarded and not any("val/pass@1" in run for run in runs.values()) else "pass@1"
    captions = []
    if unjudged:
        captions.append(f"held-out completions that could not be judged and count nowhere: {', '.join(unjudged)}")
    if rewarded and measured == "pass@1":
        told = ", ".join(f"{name}: {_first_and_last(points)}" for name, points in rewarded.items())
        captions.append(f"held-out reward where no reward says what is right: {told}")
    table = Table(
        title=f"held-out {measured}, then means over the last fifth of the rollouts",
        title_justify="left",
        caption="\n".join(captions) or None,
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("algorithm", no_wrap=True)
    times = ["step_time"]
    headings = [measured, "reward", "length right", "length wrong", "KL", "entropy", "time, s"]
    if any(seconds for run in runs.values() for _, seconds in run.get("time/teacher", [])):
        times.append("time/teacher")
        headings.append("teacher, s")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading == measured)
    for algorithm, run in runs.items():
        held_out = run.get(f"val/{measured.removeprefix('val/')}")
        cells = [_first_and_last(held_out) if held_out else "–"]
        for name, column in CURVES.items():
            points = run.get(column, [])
            late = [value for _, value in points[-max(1, len(points) // 5) :]]
            cells.append(f"{fmean(late):.{1 if name.startswith('length') else 3}f}" if late else "–")
        cells += [f"{median(value for _, value in run[time]) if time in run else 0.0:.2f}" for time in times]
        table.add_row(algorithm, *cells)
    return table


def _first_and_last(points: Points) -> str:
    return f"{points[0][1]:.3f} → {points[-1][1]:.3f}"


def draw_curves(path: Path, runs: Runs, title: str) -> None:
    """Draws reward, length of correct and of wrong completions, KL and entropy over rollouts, and writes a PNG.

    Thin lines are the measured values, thick lines a centred moving average over a tenth of the run."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 7), layout="constrained")
    looks: dict[str, dict[str, Any]] = {  # once the colours have been used, lines are dashed
        run: {"color": PALETTE[i % len(PALETTE)], "linestyle": SOLID if i < len(PALETTE) else DASHED}
        for i, run in enumerate(runs)
    }
    panels = figure.subplots(2, 2, sharex=True)
    for ax, (heading, names) in zip(panels.flatten(), PANELS.items(), strict=True):
        ax.set_title(heading, loc="left", fontsize=10)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        for algorithm, run in runs.items():
            for name in names:
                if points := run.get(CURVES[name]):
                    look = looks[algorithm] | ({"linestyle": DOTTED} if name == "length_wrong" else {})
                    steps, values = zip(*points, strict=True)
                    ax.plot(steps, values, **look, linewidth=0.8, alpha=0.3)
                    ax.plot(steps, moving_average(values, len(values) // 20), **look, linewidth=1.8)
    (_, length), (kl, entropy) = panels
    kinds = {"correct": SOLID, "wrong": DOTTED}
    lines = [Line2D([], [], color="0.3", linestyle=dashes, label=label) for label, dashes in kinds.items()]
    length.legend(handles=lines, frameon=False, fontsize=9)
    for ax in (kl, entropy):
        ax.set_xlabel("rollout")
    if not any(run.get("kl") for run in runs.values()):
        kl.text(0.5, 0.5, "none of these has a reference model", ha="center", transform=kl.transAxes)
        kl.set_yticks([])
    handles = [Line2D([], [], **look, linewidth=2, label=algorithm) for algorithm, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(runs)), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and its ``reach`` neighbours on either side; near the ends of fewer, as many on one side as on
    the other."""
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        means.append(fmean(values[i - near : i + near + 1]))
    return means
