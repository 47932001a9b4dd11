"""Sweeps the learning rates around those that a run derives, over tasks and sizes; the record that the rules rest on.

Each probe is a process of at most 90 s on a task that `grpo-pl new` writes: `validate` after a short cold start, at
several rates of the cold start, or a short `fit` from one and the same cold start, at several rates of its updates.
A finished probe is a line of the record at once; a probe that is there is not run again.

    python benchmarks/defaults.py --hours 4 --record benchmarks/results/defaults.jsonl
    python benchmarks/defaults.py --summary --record benchmarks/results/defaults.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from common import processor
from runs import GRPO_PL, metric_rows, numbers

from grpo_pl.training.defaults import demonstration_rate, peak_rate

TASKS = (
    "gcd", "number_sorting", "count_bits", "string_insertion", "simple_equations", "chain_sum", "spell_backward",
    "letter_counting",
)  # fmt: skip
SIZES = {"64x2": (64, 2), "96x3": (96, 3), "128x3": (128, 3)}
"""Width and layers, by a name that says them: a record goes on by it."""
FACTORS = (0.3, 1.0, 3.0)
"""Of the rate that the rule gives."""
LIMIT_S = 90.0
COLD_STEPS, ROLLOUTS = 150, 12


def probes() -> Iterator[dict[str, Any]]:
    """All probes, those first that are needed for a first look at every size."""
    for factor, task, size, what in itertools.product((1.0, 3.0, 0.3), TASKS, SIZES, ("cold start", "updates")):
        yield {"task": task, "size": size, "what": what, "factor": factor}


def write_task(task: str, size: str, folder: Path) -> tuple[Path, int]:
    """The configuration of a task at a size, and the number of parameters of its blocks and embeddings, about."""
    made = folder / f"{task}_{size}"
    if not made.exists():
        command = [*GRPO_PL, "new", str(made), f"--from=reasoning_gym:{task}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(folder))
        config = yaml.safe_load((made / "config.yaml").read_text())
        width, layers = SIZES[size]
        shape = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
        config["model"]["policy"]["from_scratch"] |= shape
        (made / "config.yaml").write_text(yaml.safe_dump(config))
    width, layers = SIZES[size]
    return made / "config.yaml", layers * width**2 * (4 + 33 // 4) + 100 * width


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "GRPO_PL_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }


def run(probe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A probe and what it found; a probe that took too long has no figures."""
    config, parameters = write_task(probe["task"], probe["size"], folder)
    cold, updates = demonstration_rate(parameters, "from scratch"), peak_rate(parameters, "from scratch")
    rates = {"cold start": cold, "updates": updates}
    rates[probe["what"]] *= probe["factor"]
    output = folder / "runs" / f"{time.time_ns()}"
    common = [
        f"--config={config}",
        f"--model.cold_start.steps={COLD_STEPS}",
        f"--model.cold_start.lr={rates['cold start']:.2e}",
        "--data.val_prompts=90",  # count_bits has 92
    ]
    if probe["what"] == "cold start":
        command = ["validate", *common, f"--output={output}.json"]
    else:
        fit = [
            f"--model.optimization.lr={rates['updates']:.2e}",
            f"--data.steps={ROLLOUTS}",
            "--data.prompts_per_step=16",
        ]
        command = ["fit", *common, *fit, f"--runs_dir={output}", "--name=probe", "--trainer.val_check_interval=1000"]
    start = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [*GRPO_PL, *command],
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
        error = " ".join([f"status {done.returncode}", *done.stderr.splitlines()[-1:]]) if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"longer than {LIMIT_S:g} s"
    found = {
        **probe,
        "rate": rates[probe["what"]],
        "seconds": round(time.monotonic() - start, 1),
        "parameters": parameters,
    }
    if error:
        return {**found, "error": error[:200]}
    return {
        **found,
        **(_validated(Path(f"{output}.json")) if probe["what"] == "cold start" else _fitted(output / "probe")),
    }


def _validated(file: Path) -> dict[str, float]:
    metrics = json.loads(file.read_text())["metrics"]
    return {key: round(float(metrics[f"val/{key}"]["value"]), 4) for key in ("pass@1", "greedy")}


def _fitted(run_folder: Path) -> dict[str, float]:
    held_out = numbers(metric_rows(run_folder, "val/pass@1"), "val/pass@1", 9)
    steps = metric_rows(run_folder, "step_time")
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "gain": round(held_out[-1] - held_out[0], 4),
        "equal_groups": float(steps[0].get("frac_reward_zero_std") or "nan"),
        "step_s": round(statistics.median(numbers(steps, "step_time")), 2),
    }


def summary(record: Path) -> str:
    """Means over tasks by size and factor: gain of the updates, pass@1 after the cold start."""
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    lines = ["size    factor  gain of updates (tasks)  pass@1 after cold start (tasks)  without figures"]
    for size, factor in itertools.product(SIZES, FACTORS):
        mine = [row for row in rows if row["size"] == size and row["factor"] == factor]
        gains, starts = ([row[key] for row in mine if key in row] for key in ("gain", "pass@1"))
        shown = [f"{statistics.mean(values):+.3f} ({len(values)})" if values else "none" for values in (gains, starts)]
        failed = sum("error" in row for row in mine)
        lines.append(f"{size:<7} {factor:<7g} {shown[0]:<24} {shown[1]:<32} {failed}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("benchmarks/results/defaults.jsonl"))
    parser.add_argument("--hours", type=float, default=4.0, help="begins no probe after so many hours")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--summary", action="store_true", help="only print the means of the record")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary(arguments.record))
        return
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.record.read_text().splitlines() if arguments.record.is_file() else []
    keys = ("task", "size", "what", "factor")
    done = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    end = time.monotonic() + 3600 * arguments.hours
    with tempfile.TemporaryDirectory() as folder, arguments.record.open("a") as record:
        for probe in probes():
            if probe["task"] not in arguments.tasks or probe["size"] not in arguments.sizes:
                continue
            if tuple(probe.values()) in done or time.monotonic() > end:
                continue
            about = {"machine": f"{os.cpu_count()} cores, {processor()}", "load": round(os.getloadavg()[0], 1)}
            found = {**run(probe, Path(folder)), **about, "date": time.strftime("%Y-%m-%d")}
            record.write(json.dumps(found) + "\n")
            record.flush()
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
