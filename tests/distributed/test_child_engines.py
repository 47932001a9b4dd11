"""Two processes with an engine each make the run of one, also where one engine's process ends in the middle."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import assert_nearly_equal

PLUGINS = Path(__file__).parents[1] / "plugins"
STRATEGIES = Path(__file__).parents[2] / "configs/strategy"
SHORT = {"data__steps": 2, "data__val_prompts": 2, "trainer__val_check_interval": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "staleness"), [("ddp", 0), ("fsdp", 0), ("fsdp", 1)])
def test_an_engine_that_ends_on_one_rank_costs_no_sample(
    command_line: Any, read_metrics: Callable[..., list[dict[str, str]]], tmp_path: Path, strategy: str, staleness: int
) -> None:
    short = {**SHORT, "data__staleness": staleness}
    command_line.done("fit", "--config", command_line.config(f"whole_{strategy}{staleness}", **short))
    config = command_line.config("two", **short, model__engine={"class_path": "child_engines.DyingOnRankOneEngine"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "grpo_pl"]
    done = subprocess.run(
        [*torchrun, "fit", f"--config={config}", f"--config={STRATEGIES / strategy}.yaml", f"--runs_dir={tmp_path}"],
        env={
            **os.environ,
            "GRPO_PL_CACHE": str(command_line.cache),
            "PYTHONPATH": os.pathsep.join([str(PLUGINS), *filter(None, sys.path)]),
            "MARK": str(tmp_path / "mark"),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "mark").exists()
    ours = read_metrics(tmp_path / "two/metrics.csv")
    reference = read_metrics(command_line.runs / f"whole_{strategy}{staleness}/metrics.csv")
    errors = [float(row["sampling/sync_error"]) for row in ours if "reward" in row]
    assert len(errors) == 2 and max(errors) < 1e-5
    shared = [{key: row[key] for key in other} for row, other in zip(ours, reference, strict=True)]
    assert_nearly_equal(shared, reference, rel=1e-3)  # ours has the errors of its engines as well
