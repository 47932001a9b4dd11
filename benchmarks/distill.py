"""Distils the quickstart's policy into a smaller one: sampled tokens until held-out greedy answers are 95 % right, by
distillation and by GRPO alone from the same cold start."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import parser_of, publish, surroundings, write
from runs import CONFIGS, Run, fit, numbers, seeds_of

STUDENT, TEACHER = CONFIGS / "distill.yaml", CONFIGS / "quickstart.yaml"
WANTED = 0.95
TOKEN = {"model.algorithm.terms.distillation.init_args.divergence": "none"}
REWARDED: dict[str, Any] = {
    "model.algorithm.terms.distillation": "null",
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


def fitted(config: Path, folder: Path, name: str, seed: int, options: Mapping[str, Any]) -> Run:
    """One run; those of a seed share their cold start."""
    flags = [f"--{key}={value}" for key, value in options.items()]
    return fit(config, folder, *seeds_of(seed), *flags, name=name)


def curve(run: Run, key: str = "val/greedy") -> list[tuple[int, float]]:
    """(tokens sampled so far, held-out greedy) at each validation; those that it draws itself do not count."""
    points, tokens = [], 0
    for row in run.rows("step"):
        tokens = int(float(row.get("num_tokens") or tokens))
        if row.get(key):
            points.append((tokens, round(float(row[key]), 4)))
    return points


def reached(points: Sequence[tuple[int, float]]) -> int | None:
    """Tokens sampled before the first validation with what is wanted; None if there is none."""
    return next((tokens for tokens, greedy in points if greedy >= WANTED), None)


def means(run: Run) -> dict[str, float]:
    """Mean seconds of a step's stages, without the first step."""
    rows = run.rows("step_time")[1:]
    found = {name: numbers(rows, name, 9) for name in ("step_time", "time/rollout", "time/teacher", "time/backward")}
    return {name: round(fmean(values), 4) for name, values in found.items() if values}


def one_arm(arm: str, seed: int, folder: Path, teacher: Path, extra: Sequence[str]) -> dict[str, Any]:
    """One student's run."""
    given = dict(option.removeprefix("--").split("=", 1) for option in extra)
    options = {"model.teacher.path": teacher, "trainer.val_check_interval": 10, **ARMS[arm], **given}
    run = fitted(STUDENT, folder, f"{arm.replace(' ', '_')}_{seed}", seed, options)
    points = curve(run)
    return {"tokens_until_wanted": reached(points), "sampled": points[-1][0], "curve": points, "seconds": means(run)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--teacher", type=Path, help="run folder of a trained quickstart; without it one is trained")
    arguments, extra = parser.parse_known_args()
    record: dict[str, Any] = {
        "benchmark": "distill",
        **surroundings("cpu"),
        "wanted_greedy": WANTED,
        "runs": [{"seed": seed} for seed in arguments.seeds],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        teacher = Run(arguments.teacher, 0.0, 0.0)
        if arguments.teacher is None:
            settings: dict[str, Any] = {"data.steps": 180, "trainer.val_check_interval": 180}
            settings |= {"model.algorithm.num_minibatches": 1, "model.algorithm.mismatch": "auto"}
            teacher = fitted(TEACHER, folder, "teacher", 0, settings)
        tokens, greedy = curve(teacher)[-1]
        record["teacher"] = {"greedy": greedy, "tokens": tokens}
        for arm in arguments.arms:
            for run in record["runs"]:
                run[arm] = one_arm(arm, run["seed"], folder, teacher.folder / "export", extra)
                print(json.dumps({"seed": run["seed"], "arm": arm, **run[arm]}), flush=True)
                write(record, arguments.output)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
