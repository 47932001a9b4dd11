"""Runs the quickstart with several seeds; records accuracy, seconds of the whole command and its parts, and memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops import _EvaluationLoop
from runs import CONFIGS, fit, numbers, record_seeds, seeds_of

from grpo_pl.training import module

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
        for owner, method, part in ((module, "make_start", "cold start"), (_EvaluationLoop, "run", "validation")):
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
    file, path = folder / "parts.json", [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    options = [*seeds_of(seed), *extra, "--trainer.callbacks+=quickstart.NoteParts"]
    variables = {"PYTHONPATH": os.pathsep.join(path), PARTS: str(file)}
    start = time.time()
    done = fit(CONFIGS / "quickstart.yaml", folder, *options, variables=variables)
    end, noted = time.time(), json.loads(file.read_text())
    rows, held_out = done.rows("step"), done.rows("val/pass@1")
    sampled, greedy = numbers(held_out, "val/pass@1", 9), numbers(held_out, "val/greedy", 9)
    parts = {
        "start": noted["begun"] - start - noted["cold start"],  # from the command to the first validation
        "cold start": noted["cold start"],
        **{part: sum(float(row.get(key) or 0.0) for row in rows for key in keys) for part, keys in OF_STEPS.items()},
        "validation": noted["validation"],
        "report": end - noted["ended"],  # with the export
    }
    parts["rest"] = end - start - sum(parts.values())  # metrics, callbacks, checkpoints
    return {
        "seed": seed,
        "seconds": round(done.seconds, 1),
        "parts": {part: round(value, 2) for part, value in parts.items()},
        "cpu_seconds": round(done.cpu_seconds, 1),
        "pass@1_before": sampled[0],
        "pass@1_after": sampled[-1],
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "well_formed_at_the_end": round(well_formed(done.folder / "completions.jsonl"), 4),
    }


def well_formed(completions: Path, rollouts: int = 20) -> float:
    """Share of the logged completions of the last rollouts for which the format reward is 1."""
    rows = [json.loads(line) for line in completions.read_text().splitlines()]
    last = max(row["step"] for row in rows)
    paid = [row["rewards"]["format"]["value"] == 1.0 for row in rows if row["step"] > last - rollouts]
    return sum(paid) / len(paid)


if __name__ == "__main__":
    record_seeds(__doc__, "quickstart", run)
