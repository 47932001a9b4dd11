"""A policy that cannot add without a worked solution in its prompt: held-out answers of self-distillation, and of GRPO
alone from the same cold start."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from common import parser_of, publish, surroundings, write
from distill import curve, fitted, means
from runs import CONFIGS, Run, numbers

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


def result(run: Run) -> dict[str, Any]:
    """Curves of (tokens sampled, held-out share of right answers), and the share of groups with unequal rewards."""
    equal = numbers(run.rows("frac_reward_zero_std"), "frac_reward_zero_std", 9)
    curves = {"curve": curve(run), "pass@1": curve(run, "val/pass@1")}
    return {**curves, "rollouts": len(equal), "groups_with_unequal_rewards": round(1.0 - fmean(equal), 5)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
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
                name = f"{arm.replace(' ', '_')}_{run['seed']}"
                options = {**ARMS[arm], **given}
                done = fitted(CONFIGS / "self_distill.yaml", folder, name, run["seed"], options)
                run[arm] = {**result(done), "seconds": {"whole run": round(done.seconds, 1), **means(done)}}
                print(json.dumps({"seed": run["seed"], "arm": arm, **run[arm]}), flush=True)
                write(record, arguments.output)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
