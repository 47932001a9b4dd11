"""Distils the quickstart's policy into a smaller one: sampled tokens until held-out greedy answers are 95 % right, by
distillation and by GRPO alone from the same cold start."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import processor, publish

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
STUDENT, TEACHER = CONFIGS / "distill.yaml", CONFIGS / "quickstart.yaml"
WANTED = 0.95
TOKEN = {"model.algorithm.supervision": "token", "model.algorithm.distillation": "none"}
REWARDED: dict[str, Any] = {
    "model.algorithm.distillation": "none",
    "model.algorithm.distillation_alone": "false",
    "model.algorithm.baseline": "group_mean",
    "model.algorithm.scale": "group_std",
    "model.algorithm.aggregation": "sequence_mean",
    "model.algorithm.group_size": 8,
    "model.optimization.lr": 6e-4,
    "model.optimization.schedule": "constant",  # it ends long before it is done
    "data.prompts_per_step": 32,
    "data.steps": 40,
    "trainer.val_check_interval": 5,
}
"""The quickstart's GRPO, a rollout of which has four times the completions."""
ARMS: Mapping[str, Mapping[str, Any]] = {"whole distributions": {}, "sampled tokens": TOKEN, "GRPO alone": REWARDED}


def fit(config: Path, folder: Path, name: str, seed: int, options: Mapping[str, Any], cache: Path) -> Path:
    """Runs one `grpo-pl fit` in a new process and returns its run folder."""
    seeds = {
        "seed_everything": seed,
        "model.policy.init_seed": seed,
        "model.cold_start.seed": seed,
        "data.source.init_args.seed": seed,
    }
    flags = [f"--{key}={value}" for key, value in {**seeds, **options}.items()]
    command = [sys.executable, "-m", "grpo_pl", "fit", f"--config={config}", f"--runs_dir={folder}", f"--name={name}"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(cache)}
    subprocess.run([*command, *flags], check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder / name


def curve(run: Path) -> list[tuple[int, float]]:
    """(tokens sampled so far, held-out greedy) at each validation; those that it draws itself do not count."""
    points, tokens = [], 0
    with (run / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            tokens = int(float(row.get("num_tokens") or tokens))
            if row.get("val/greedy"):
                points.append((tokens, round(float(row["val/greedy"]), 4)))
    return points


def reached(points: Sequence[tuple[int, float]]) -> int | None:
    """Tokens sampled before the first validation with what is wanted; None if there is none."""
    return next((tokens for tokens, greedy in points if greedy >= WANTED), None)


def means(run: Path, *names: str) -> dict[str, float]:
    """Mean seconds of a step's stages, without the first step."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("step_time")][1:]
    found = {name: [float(row[name]) for row in rows if row.get(name)] for name in names}
    return {name: round(sum(values) / len(values), 4) for name, values in found.items() if values}


def one_arm(arm: str, seed: int, folder: Path, teacher: Path, extra: Sequence[str]) -> dict[str, Any]:
    """One student's run; those of a seed share their cold start."""
    given = dict(option.removeprefix("--").split("=", 1) for option in extra)
    options = {"model.teacher.path": teacher, "trainer.val_check_interval": 10, **ARMS[arm], **given}
    run = fit(STUDENT, folder, f"{arm.replace(' ', '_')}_{seed}", seed, options, folder / "cache")
    points = curve(run)
    stages = means(run, "step_time", "time/rollout", "time/teacher", "time/backward")
    return {"tokens_until_wanted": reached(points), "sampled": points[-1][0], "curve": points, "seconds": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--teacher", type=Path, help="run folder of a trained quickstart; without it one is trained")
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments, extra = parser.parse_known_args()
    record: dict[str, Any] = {
        "benchmark": "distill",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning")},
        "wanted_greedy": WANTED,
        "runs": [{"seed": seed} for seed in arguments.seeds],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        teacher = arguments.teacher
        if teacher is None:
            settings = {"data.steps": 180, "trainer.val_check_interval": 180}
            teacher = fit(TEACHER, folder, "teacher", 0, settings, folder / "cache")
        record["teacher"] = {"greedy": curve(teacher)[-1][1], "tokens": curve(teacher)[-1][0]}
        for arm in arguments.arms:
            for run in record["runs"]:
                run[arm] = one_arm(arm, run["seed"], folder, teacher / "export", extra)
                print(json.dumps({"seed": run["seed"], "arm": arm, **run[arm]}), flush=True)
                if arguments.output:  # a long benchmark that is ended leaves what it has
                    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
