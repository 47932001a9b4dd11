"""What runs measured while they were trained, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from rich.table import Table

from grpo_pl.evaluation.curves import Points

CURVES = {
    "reward": "reward",
    "length_correct": "completions/mean_length_correct",
    "length_wrong": "completions/mean_length_wrong",
    "kl": "kl",
    "entropy": "entropy",
}
"""Name of a curve -> column of a run's ``metrics.csv``."""
Runs = Mapping[str, Mapping[str, Points]]
"""Name of a run -> its columns, from `read_curves`."""


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
    table.add_column("run", no_wrap=True)
    times = ["step_time"]
    headings = [measured, "reward", "length right", "length wrong", "KL", "entropy", "time, s"]
    if any(seconds for run in runs.values() for _, seconds in run.get("time/teacher", [])):
        times.append("time/teacher")
        headings.append("teacher, s")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading == measured)
    for name_of_run, run in runs.items():
        held_out = run.get(f"val/{measured.removeprefix('val/')}")
        cells = [_first_and_last(held_out) if held_out else "–"]
        for name, column in CURVES.items():
            points = run.get(column, [])
            late = [value for _, value in points[-max(1, len(points) // 5) :]]
            cells.append(f"{fmean(late):.{1 if name.startswith('length') else 3}f}" if late else "–")
        cells += [f"{median(value for _, value in run[time]) if time in run else 0.0:.2f}" for time in times]
        table.add_row(name_of_run, *cells)
    return table


def _first_and_last(points: Points) -> str:
    return f"{points[0][1]:.3f} → {points[-1][1]:.3f}"
