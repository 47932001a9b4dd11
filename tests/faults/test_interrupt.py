"""A run that is asked to stop, by Ctrl-C or SIGTERM, keeps its last completed rollout and goes on from there."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_pl.files.checkpoints import newest_whole, rollouts_of
from tests.faults.conftest import Death


@pytest.fixture(autouse=True)
def _ctrl_c_reaches_children() -> Iterator[None]:
    """Shells start background jobs with Ctrl-C ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _wait_until(process: Any, condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.is_alive()
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("number", "status", "moment", "visit"),
    [
        (signal.SIGINT, 130, "rollout", 90),
        (signal.SIGTERM, 143, "rollout", 90),
        pytest.param(signal.SIGTERM, 143, "validation", 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_its_last_completed_rollout_and_goes_on_from_there(
    quickstart: Any,
    assert_same_end: Callable[[Any], None],
    read_metrics: Callable[..., Any],
    number: signal.Signals,
    status: int,
    moment: Any,
    visit: int,
) -> None:
    never = ("--checkpoint.every_n_rollouts=100", "--checkpoint.keep_best=0")
    assert quickstart.fit("--resume", *never, death=Death(moment, visit, number)) == status, quickstart.log
    assert ("stopped by Ctrl-C; --resume goes on." in quickstart.log) == (number == signal.SIGINT)
    assert "Traceback" not in quickstart.log
    checkpoint = newest_whole(quickstart.run / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None
    done = [int(row["step"]) for row in read_metrics(quickstart.run / "metrics.csv") if "reward" in row]
    assert 1 <= rollouts_of(checkpoint) == done[-1] < 6
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)


def test_a_live_view_ends_before_it_is_said_how_to_go_on(quickstart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TTY_COMPATIBLE", "FORCE_COLOR"):  # as before a terminal
        monkeypatch.setenv(name, "1")
    live = "--trainer.callbacks+=grpo_pl.extras.live.callback.LiveView"
    stopped = Death("rollout", 90, signal.SIGINT)
    assert quickstart.fit(live, "--trainer.enable_progress_bar=false", death=stopped) == 130, quickstart.log
    assert "held-out problem" in quickstart.log
    assert quickstart.log.endswith("grpo-pl fit: stopped by Ctrl-C; --resume goes on.\n")


def test_ctrl_c_before_training_leaves_no_run_folder(quickstart: Any) -> None:
    process = quickstart.start("--model.cold_start.steps=5000")
    log = quickstart.folder / "log"
    _wait_until(process, lambda: log.exists() and "cold start: " in quickstart.log)
    os.kill(process.pid, signal.SIGINT)
    process.join(250)
    assert process.exitcode == 130, quickstart.log
    assert not quickstart.run.exists()
    assert quickstart.log.endswith("grpo-pl fit: stopped by Ctrl-C.\n")
    assert "Traceback" not in quickstart.log
