"""Compares several runs: writes their curves to one CSV file, prints them as a table and draws them as a PNG."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from rich.table import Table

from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.files.writing import staged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "reward": "reward",
    "length_correct": "completions/mean_length_correct",
    "length_wrong": "completions/mean_length_wrong",
    "kl": "kl",
    "entropy": "entropy",
}
"""Column of the comparison's CSV -> column of a run's ``metrics.csv``."""


@dataclass(frozen=True)
class RunCurves:
    """The metrics that one run logged, by rollout."""

    curves: Mapping[str, Points]
    """Curves by the names of ``CURVES``; empty if the run never logged that metric, such as KL without a reference."""
    held_out: Points
    """The curve of ``val/pass@1``."""
    unjudged: int
    """Held-out completions of the last validation that could not be judged and are left out of every metric."""
    seconds: float
    """Median of ``step_time`` in seconds; 0 if it was never logged."""
    teacher_seconds: float = 0.0
    """Median of ``time/teacher``, of those; 0 without a teacher."""

    def late(self, name: str) -> float | None:
        """Mean over the last fifth of the points of a curve, at least one; None if it is empty."""
        points = self.curves[name]
        last = points[-max(1, len(points) // 5) :]
        return fmean(value for _, value in last) if last else None


def read_run(metrics: Path) -> RunCurves:
    """Reads the curves of a run from its ``metrics.csv``."""
    columns = read_curves(metrics)
    seconds, taught = ([value for _, value in columns.get(name, [])] for name in ("step_time", "time/teacher"))
    return RunCurves(
        curves={name: columns.get(column, []) for name, column in CURVES.items()},
        held_out=columns.get("val/pass@1", []),
        unjudged=int(columns["val/unjudged"][-1][1]) if "val/unjudged" in columns else 0,
        seconds=median(seconds) if seconds else 0.0,
        teacher_seconds=median(taught) if taught else 0.0,
    )


def write_curves(path: Path, runs: Mapping[str, RunCurves]) -> None:
    """One row per run and rollout: ``algorithm, rollout, reward, …``; cells without a value are empty."""
    with staged(path) as staging, staging.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "rollout", *CURVES])
        for algorithm, run in runs.items():
            columns = {name: dict(run.curves[name]) for name in CURVES}
            for rollout in sorted({step for column in columns.values() for step in column}):
                writer.writerow([algorithm, rollout, *(columns[name].get(rollout, "") for name in CURVES)])


def results_table(runs: Mapping[str, RunCurves]) -> Table:
    """First and last held-out pass@1 of each run, and the late mean of each curve; fits a terminal of 80 columns, and
    with the seconds that a teacher takes in a step one of 90.

    The caption tells how many held-out completions could not be judged, if there are any.
    """
    title = "held-out pass@1, then means over the last fifth of the rollouts"
    left_out = [f"{name}: {run.unjudged}" for name, run in runs.items() if run.unjudged]
    caption = f"held-out completions that could not be judged and count nowhere: {', '.join(left_out)}"
    table = Table(
        title=title,
        title_justify="left",
        caption=caption if left_out else None,
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("algorithm", no_wrap=True)
    taught = ["teacher, s"] if any(run.teacher_seconds for run in runs.values()) else []
    for heading in ("pass@1", "reward", "length right", "length wrong", "KL", "entropy", "time, s", *taught):
        table.add_column(heading, justify="right", no_wrap=heading == "pass@1")
    for algorithm, run in runs.items():
        ends = {name: run.late(name) for name in CURVES}
        digits = {"length_correct": 1, "length_wrong": 1}
        cells = ["–" if value is None else f"{value:.{digits.get(name, 3)}f}" for name, value in ends.items()]
        held_out = f"{run.held_out[0][1]:.3f} → {run.held_out[-1][1]:.3f}" if run.held_out else "–"
        cells += [f"{run.seconds:.2f}", *([f"{run.teacher_seconds:.2f}"] if taught else [])]
        table.add_row(algorithm, held_out, *cells)
    return table


def draw_curves(path: Path, runs: Mapping[str, RunCurves], title: str) -> None:
    """Draws reward, length of correct and of wrong completions, KL and entropy over rollouts, and writes a PNG.

    Thin lines are the measured values, thick lines a centred moving average over a tenth of the run.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = _panels(figure)
    handles = []
    for number, (algorithm, run) in enumerate(runs.items()):
        colour = PALETTE[number % len(PALETTE)]
        dashes = SOLID if number < len(PALETTE) else DASHED  # once the colours have been used
        for name, ax in panels.items():
            _draw(ax, run.curves[name], colour, DOTTED if name == "length_wrong" else dashes)
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=2, label=algorithm))
    if not any(run.curves["kl"] for run in runs.values()):
        where = panels["kl"].transAxes
        panels["kl"].text(0.5, 0.5, "none of these has a reference model", ha="center", transform=where)
        panels["kl"].set_yticks([])
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(runs)), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)


def _panels(figure: Figure) -> dict[str, Axes]:
    """The panel of each name in ``CURVES``; both lengths share one of the four panels."""
    from matplotlib.lines import Line2D

    reward, length, kl, entropy = figure.subplots(2, 2, sharex=True).flatten()
    headings = {"reward": reward, "tokens per completion": length, "KL to the reference, per token": kl}
    for heading, ax in (headings | {"entropy, nats per token": entropy}).items():
        ax.set_title(heading, loc="left", fontsize=10)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in (kl, entropy):
        ax.set_xlabel("rollout")
    kinds = {"correct": SOLID, "wrong": DOTTED}
    lines = [Line2D([], [], color="0.3", linestyle=dashes, label=label) for label, dashes in kinds.items()]
    length.legend(handles=lines, frameon=False, fontsize=9)
    return {"reward": reward, "length_correct": length, "length_wrong": length, "kl": kl, "entropy": entropy}


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""The colours of Okabe and Ito (2008), which colour-blind readers can tell apart."""


Dashes = tuple[float, tuple[float, ...]]
SOLID, DASHED, DOTTED = (0.0, ()), (0.0, (5.0, 2.0)), (0.0, (1.0, 1.5))


def _draw(ax: Axes, points: Sequence[tuple[int, float]], colour: str, dashes: Dashes) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    ax.plot(steps, values, color=colour, linestyle=dashes, linewidth=0.8, alpha=0.3)
    ax.plot(steps, moving_average(values, len(values) // 20), color=colour, linestyle=dashes, linewidth=1.8)


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and its ``reach`` neighbours on either side; near the ends of fewer, as many on one side as on
    the other."""
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        means.append(fmean(values[i - near : i + near + 1]))
    return means
