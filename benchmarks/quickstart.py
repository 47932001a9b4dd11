"""Runs the quickstart with several seeds; records accuracy, seconds of the whole command and its parts, and memory."""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from common import processor
from lightning.pytorch.loops import _EvaluationLoop

from grpo_pl.training.cold_start import ColdStart

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
PARTS = "GRPO_PL_BENCHMARK_PARTS"
"""Environment variable: the file that `NoteParts` writes."""
OF_STEPS = {
    "rollouts": ("time/rollout",),
    "rewards": ("time/reward",),
    "updates": ("time/logprobs", "time/backward", "time/optimizer"),
}
"""Part of a run -> the columns of ``metrics.csv`` that it is the sum of."""


class NoteParts(pl.Callback):
    """Writes when training begins and ends, and the seconds of cold start and validations, into a file."""

    def __init__(self) -> None:
        self.noted: dict[str, float] = {"cold start": 0.0, "validation": 0.0}
        for owner, method, part in ((ColdStart, "ensure", "cold start"), (_EvaluationLoop, "run", "validation")):
            setattr(owner, method, self._timed(getattr(owner, method), part))

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = method(*args, **kwargs)
            self.noted[part] += time.perf_counter() - start
            return found

        return timed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.noted["begun"] = time.time()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.noted["ended"] = time.time()
        Path(os.environ[PARTS]).write_text(json.dumps(self.noted))


def run(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Runs one `grpo-pl fit`, cold start included, in a new process with an empty cache."""
    seeds = [
        f"--seed_everything={seed}",
        f"--model.policy.init_seed={seed}",
        f"--model.cold_start.seed={seed}",
        f"--data.source.init_args.seed={seed}",
    ]
    command = [sys.executable, "-m", "grpo_pl", "fit", f"--config={CONFIG}", f"--runs_dir={folder}", *seeds, *extra]
    environment = {
        **os.environ,
        "GRPO_PL_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        PARTS: str(folder / "parts.json"),
    }
    command.append("--trainer.callbacks+=quickstart.NoteParts")
    start, used = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    end, now = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    noted = json.loads((folder / "parts.json").read_text())
    with (folder / "quickstart" / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = [row for row in lines if row.get("val/pass@1")]
    parts = {
        "start": noted["begun"] - start - noted["cold start"],  # from the command to the first validation
        "cold start": noted["cold start"],
        **{part: sum(float(row.get(key) or 0.0) for row in lines for key in keys) for part, keys in OF_STEPS.items()},
        "validation": noted["validation"],
        "report": end - noted["ended"],  # with the export
    }
    parts["rest"] = end - start - sum(parts.values())  # metrics, callbacks, checkpoints
    return {
        "seed": seed,
        "seconds": round(end - start, 1),
        "parts": {part: round(value, 2) for part, value in parts.items()},
        "cpu_seconds": round(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, 1),
        "pass@1_before": float(rows[0]["val/pass@1"]),
        "pass@1_after": float(rows[-1]["val/pass@1"]),
        "greedy_before": float(rows[0]["val/greedy"]),
        "greedy_after": float(rows[-1]["val/greedy"]),
        "well_formed_at_the_end": round(well_formed(folder / "quickstart" / "completions.jsonl"), 4),
    }


def well_formed(completions: Path, rollouts: int = 20) -> float:
    """Share of the logged completions of the last rollouts for which the format reward is 1."""
    rows = [json.loads(line) for line in completions.read_text().splitlines()]
    last = max(row["step"] for row in rows)
    paid = [row["rewards"]["format"]["value"] == 1.0 for row in rows if row["step"] > last - rollouts]
    return sum(paid) / len(paid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    arguments, extra = parser.parse_known_args()  # the others are options of the fit
    results = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(seed, Path(folder), extra))
        print(json.dumps(results[-1]), flush=True)
    record = {
        "benchmark": "quickstart",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning")},
        "options": extra,
        # of the largest process of all runs, which is the training process; reward workers are not included
        "peak_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "runs": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
