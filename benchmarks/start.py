"""Measures the seconds from the command of the quickstart to its first step, and to the row of metrics of that step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from common import parser_of, publish, summary, surroundings
from runs import CONFIGS, GRPO_PL

BEGUN = "GRPO_PL_BENCHMARK_BEGUN"


class NoteBegin(pl.Callback):
    """Writes when the first step begins into a file."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == 0:
            Path(os.environ[BEGUN]).write_text(str(time.time()))


def fit(folder: Path, name: str) -> dict[str, float]:
    """Seconds of one fit of a single step; its cold start is taken from the cache if it is there."""
    begun, metrics = folder / f"{name}.begun", folder / name / "metrics.csv"
    command = [*GRPO_PL, "fit", f"--config={CONFIGS / 'quickstart.yaml'}", f"--runs_dir={folder}", f"--name={name}"]
    command += ["--data.steps=1", "--trainer.limit_val_batches=0", "--trainer.callbacks+=start.NoteBegin"]
    environment = {
        **os.environ,
        "GRPO_PL_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        BEGUN: str(begun),
    }
    start = time.time()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not _has_row(metrics) and process.poll() is None:
            time.sleep(0.01)
        row = time.time() - start
    if process.returncode:
        raise SystemExit(f"the fit ended with status {process.returncode}")
    return {"first_step": float(begun.read_text()) - start, "first_row": row}


def _has_row(metrics: Path) -> bool:
    return metrics.exists() and metrics.read_text().count("\n") >= 2


def importing(module: str) -> float:
    start = time.time()
    subprocess.run([sys.executable, "-c", f"import gc; gc.disable(); import {module}"], check=True)
    return time.time() - start


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fit(Path(folder), "cold")  # makes the cold start, reads the disk
        for repetition in range(arguments.repetitions):
            found = fit(Path(folder), f"warm{repetition}")
            found |= {f"import {module}": importing(module) for module in ("torch", "lightning")}
            print({name: round(value, 2) for name, value in found.items()}, flush=True)
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
    record = {"benchmark": "start", **surroundings("cpu")}
    publish({**record, "seconds": {name: summary(values) for name, values in seconds.items()}}, arguments.output)


if __name__ == "__main__":
    main()
