"""What tests of whole runs compare: rows of ``metrics.csv`` and final weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Rows = list[dict[str, str]]
ReadMetrics = Callable[..., Rows]


def steps_of(rows: Rows) -> Rows:
    """Those of rollouts; the others are of validations."""
    return [row for row in rows if "loss" in row or "reward" in row]


def assert_same_end(one: Path, other: Path) -> None:
    """The runs' last checkpoints hold equal weights."""
    ours, theirs = (torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def resumed(
    command_line: Any, read_metrics: ReadMetrics, run: Path, *options: object, after: int = 2
) -> tuple[Path, Rows]:
    """A run that goes on from a checkpoint of ``run``, and its rows, which must be those of the whole one."""
    checkpoint, name = run / f"checkpoints/rollout-{after:06d}.ckpt", f"re{run.name}"
    command_line.done("fit", f"--config={run / 'config.yaml'}", f"--ckpt_path={checkpoint}", f"--name={name}", *options)
    whole, rest = (steps_of(read_metrics(each / "metrics.csv")) for each in (run, command_line.runs / name))
    assert rest == whole[after:] != []
    return command_line.runs / name, whole
