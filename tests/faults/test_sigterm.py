"""A run that is asked to stop keeps its last completed rollout and goes on from there."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo_pl.files.checkpoints import newest_whole, rollouts_of


@pytest.mark.parametrize("moment", ["rollout", pytest.param("validation", marks=pytest.mark.slow)])
def test_sigterm_saves_the_last_completed_rollout_and_exits_143(
    quickstart: Any, assert_same_end: Callable[[Any], None], read_metrics: Callable[..., Any], moment: str
) -> None:
    metrics = quickstart.run / "metrics.csv"
    process = quickstart.start("--resume", "--checkpoint.every_n_rollouts=100", "--checkpoint.keep_best=0")
    rows = 3 if moment == "rollout" else 4  # after the third rollout comes a validation
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 1 + rows:
        assert process.is_alive(), quickstart.log
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    process.join(250)
    assert process.exitcode == 143, quickstart.log
    checkpoint = newest_whole(quickstart.run / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None
    done = [int(row["step"]) for row in read_metrics(metrics) if "reward" in row]
    assert rollouts_of(checkpoint) == done[-1] < 6
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)
