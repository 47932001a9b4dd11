"""Trains the quickstart, branches each run twice with a reward for short answers, and draws its curves.

Run ``python docs/plots/branches.py`` (about three minutes for each seed on two quiet cores); writes ``branches.csv``
and ``branches.png`` beside this file. Runs that are whole already are not made again.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ROLLOUTS = 80
"""Of the quickstart's 120, where each run ends."""
BRANCHES = (2, 40)
"""Rollouts that a run has made where its branches begin."""
REWARDS = [
    {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True}},
    {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 0.1}},
    {"class_path": "grpo_pl.rewards.LengthReward", "init_args": {"shape": "budget", "max_length": 24, "weight": 2}},
]
"""Those of the quickstart, and twice as much as a right answer for one of at most 24 tokens, falling to 0 at 48."""
PANELS = {
    "rewards/math/mean": "right answers of training (dots: where a branch begins)",
    "completions/mean_length": "tokens of a completion",
}
COLOURS = ("0.45", "#d55e00", "#0072b2")


def made(runs: Path, seed: int, options: Sequence[str]) -> dict[str, Path]:
    """Label -> ``metrics.csv`` of the run of a seed and of its branches."""
    given = [f"--config={QUICKSTART}", f"--seed_everything={seed}", "--checkpoint.keep=6"]
    found = {"the run": _fit(runs, f"seed-{seed}", [*given, *options])}
    for step in BRANCHES:
        given = [f"--branch={runs / f'seed-{seed}'}@{step}", f"--model.rewards={json.dumps(REWARDS)}"]
        found[f"short answers pay from rollout {step} on"] = _fit(runs, f"seed-{seed}-from-{step}", given)
    return found


def _fit(runs: Path, name: str, given: Sequence[str]) -> Path:
    if not (runs / name / "report.html").exists():  # which a run writes at its end
        ends = [
            f"--trainer.limit_train_batches={ROLLOUTS}",
            "--trainer.limit_val_batches=0",
            "--checkpoint.keep_best=0",
        ]
        command = [sys.executable, "-m", "grpo_pl", "fit", *given, *ends, f"--runs_dir={runs}", f"--name={name}"]
        subprocess.run(command, check=True)
    return runs / name / "metrics.csv"


def curves(file: Path) -> list[dict[str, float]]:
    """A row of each rollout that a run has made itself: its number, and the values of ``PANELS``."""
    with file.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["reward"] and int(row["step"]) <= ROLLOUTS]
    return [{"rollout": int(row["step"]), **{name: float(row[name]) for name in PANELS}} for row in rows]


def save(file: Path, table: dict[tuple[int, str], list[dict[str, float]]]) -> None:
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["seed", "curve", "rollout", *PANELS])
        for (seed, label), rows in table.items():
            writer.writerows([seed, label, *(f"{value:.6g}" for value in row.values())] for row in rows)


def plot(file: Path, table: dict[tuple[int, str], list[dict[str, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9, 3.3), layout="constrained")
    labels = list(dict.fromkeys(label for _, label in table))
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for (seed, label), rows in table.items():
            place = labels.index(label)
            points = [(row["rollout"], row[name]) for row in rows]
            if place:  # begins where its run was
                start = rows[0]["rollout"] - 1
                points = [(start, one[name]) for one in table[seed, labels[0]] if one["rollout"] == start] + points
                axis.plot(*points[0], "o", color=COLOURS[place], markersize=4, zorder=3)
            shown = label if seed == min(one for one, _ in table) else None
            axis.plot(*zip(*points, strict=True), color=COLOURS[place], linewidth=1.1, alpha=0.85, label=shown)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(0)
        axis.set_xlabel("rollout", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the two files")
    parser.add_argument("--runs", type=Path, default=Path("runs/branches"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs, of two branches each")
    given, options = parser.parse_known_args()
    table = {
        (seed, label): curves(file)
        for seed in range(given.seeds)
        for label, file in made(given.runs, seed, options).items()
    }
    save(given.out / "branches.csv", table)
    plot(given.out / "branches.png", table)


if __name__ == "__main__":
    main()
