"""A run that is asked to stop keeps its last completed rollout and goes on from there."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from grpo_pl.files.checkpoints import newest_whole, rollouts_of
from tests.faults.conftest import Death


@pytest.mark.parametrize(("moment", "visit"), [("rollout", 90), pytest.param("validation", 4, marks=pytest.mark.slow)])
def test_sigterm_saves_the_last_completed_rollout_and_exits_143(
    quickstart: Any,
    assert_same_end: Callable[[Any], None],
    read_metrics: Callable[..., Any],
    moment: str,
    visit: int,
) -> None:
    metrics, planned = quickstart.run / "metrics.csv", Death(moment, visit, signal.SIGTERM)
    never = ("--checkpoint.every_n_rollouts=100", "--checkpoint.keep_best=0")
    assert quickstart.fit("--resume", *never, death=planned) == 143, quickstart.log
    checkpoint = newest_whole(quickstart.run / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None
    done = [int(row["step"]) for row in read_metrics(metrics) if "reward" in row]
    assert 1 <= rollouts_of(checkpoint) == done[-1] < 6
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)
