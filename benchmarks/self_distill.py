"""A policy that cannot add without a worked solution in its prompt: held-out answers of self-distillation, and of GRPO
alone from the same cold start."""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import publish, surroundings
from distill import fit, means

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "self_distill.yaml"
WANTED = 0.60
REWARDED: dict[str, Any] = {
    "model.algorithm.preset": "grpo_no_kl",
    "model.algorithm.group_size": 8,
    "model.privileged": "null",
    "model.optimization.lr": 6e-4,
    "model.optimization.schedule": "constant",
    "data.steps": 100,
    "trainer.val_check_interval": 50,
}
"""The quickstart's GRPO, with eight times the completions in a rollout."""
ARMS: Mapping[str, Mapping[str, Any]] = {"self-distillation": {}, "GRPO alone": REWARDED}


def result(run: Path) -> dict[str, Any]:
    """Curves of (tokens sampled, held-out share of right answers), and the share of groups with unequal rewards."""
    found: dict[str, list[Any]] = {"curve": [], "pass@1": []}
    mixed, tokens = [], 0
    with (run / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            tokens = int(float(row.get("num_tokens") or tokens))
            if row.get("frac_reward_zero_std"):
                mixed.append(1.0 - float(row["frac_reward_zero_std"]))
            if row.get("val/greedy"):
                found["curve"].append((tokens, round(float(row["val/greedy"]), 4)))
                found["pass@1"].append((tokens, round(float(row["val/pass@1"]), 4)))
    return {**found, "rollouts": len(mixed), "groups_with_unequal_rewards": round(sum(mixed) / len(mixed), 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments, extra = parser.parse_known_args()
    given = dict(option.removeprefix("--").split("=", 1) for option in extra)
    record: dict[str, Any] = {
        "benchmark": "self_distill",
        **surroundings("cpu"),
        "wanted_greedy": WANTED,
        "runs": [{"seed": seed} for seed in arguments.seeds],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for run in record["runs"]:
            for arm in arguments.arms:
                began = time.monotonic()
                name = f"{arm.replace(' ', '_')}_{run['seed']}"
                done = fit(CONFIG, folder, name, run["seed"], {**ARMS[arm], **given}, folder / "cache")
                stages = means(done, "step_time", "time/rollout", "time/teacher", "time/backward")
                seconds = {"whole run": round(time.monotonic() - began, 1), **stages}
                run[arm] = {**result(done), "seconds": seconds}
                print(json.dumps({"seed": run["seed"], "arm": arm, **run[arm]}), flush=True)
                if arguments.output:
                    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
