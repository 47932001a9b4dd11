"""Runs with rollouts under way are stopped and killed, and come to the end of one that is not."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from grpo_pl.extras.engines import prefetched as prefetch
from grpo_pl.files.checkpoints import newest_whole, rollouts_of
from tests.faults.conftest import CONFIG, Death

pytestmark = pytest.mark.usefixtures("forked")


def _sigterm_after(process: Any, run: Any, steps: int) -> None:
    metrics = run.run / "metrics.csv"
    before = 2  # lines: names, and rollout 0's validation
    while not metrics.exists() or len(metrics.read_text().splitlines()) < before + steps:
        assert process.is_alive(), run.log
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGTERM)
    process.join(250)
    assert process.exitcode == 143, run.log


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sigterm_finishes_and_stores_what_is_under_way(
    ahead: Any, assert_same_end: Callable[[Any], None], steps: int
) -> None:
    """In the middle of a rollout; after three, of a validation. The resumed run repeats that before its first step, and
    writes the checkpoint again, which must hold the rollouts still."""
    never = ("--checkpoint.every_n_rollouts=100", "--checkpoint.keep_best=0")
    planned = Death("validation", 4, signal.SIGTERM) if steps == 3 else Death("reward", 3, signal.SIGTERM)
    assert ahead.fit("--resume", *never, death=planned) == 143, ahead.log
    checkpoint = newest_whole(ahead.run / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None and steps <= rollouts_of(checkpoint) < 6
    if steps == 3:
        assert ahead.fit("--resume", death=Death("reward", 1)) == -signal.SIGKILL, ahead.log
    assert ahead.fit("--resume") == 0, ahead.log
    assert_same_end(ahead)


@pytest.mark.slow
def test_what_takes_too_long_after_sigterm_is_in_no_checkpoint(
    ahead: Any, assert_same_end: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "FINISH_WITHIN_S", 0.1)
    process = ahead.start("--resume", "--model.engine.init_args.pause_s=0.1")
    _sigterm_after(process, ahead, 1)
    assert newest_whole(ahead.run / "checkpoints", warn=pytest.fail) is None
    assert ahead.fit("--resume") == 0, ahead.log
    assert_same_end(ahead)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", ["ahead", pytest.param("ahead_on_vllm", marks=pytest.mark.vllm)])
def test_twenty_deaths_with_rollouts_under_way_leave_no_trace(
    ahead: Any, assert_same_end: Callable[[Any], None], config: str
) -> None:
    """Kills by the clock, wherever it finds the process; it starts anew when it comes to the end."""
    ahead = replace(ahead, configs=(CONFIG, CONFIG.with_name(f"{config}.yaml")))
    rng = random.Random(0)
    begun = time.monotonic()
    assert replace(ahead, folder=ahead.folder.with_name("measured")).fit() == 0
    whole = time.monotonic() - begun
    killed = ended = 0
    while killed < 20:
        if ahead.killed_after(rng.uniform(0.2, 0.8) * whole):
            killed += 1
        else:
            assert_same_end(ahead)
            ended += 1
            ahead.run.rename(ahead.run.with_name(f"ended{ended}"))
    assert ahead.fit("--resume") == 0, ahead.log
    assert_same_end(ahead)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", ["ahead", pytest.param("ahead_on_vllm", marks=pytest.mark.vllm)])
def test_twenty_deaths_of_the_engine_inside_runs_leave_no_trace(
    ahead: Any, assert_same_end: Callable[[Any], None], config: str
) -> None:
    """Kills by the clock, with two checkpoints between two deaths, of which the second waits for all rollouts that were
    under way in the first: a second death in one rollout ends the run."""
    ahead = replace(ahead, configs=(CONFIG, CONFIG.with_name(f"{config}.yaml")))
    rng, killed, runs = random.Random(0), 0, 0
    while killed < 20:
        one = replace(ahead, folder=ahead.folder.with_name(f"runs{runs}"))
        process, wanted = one.start(), 1
        while process.is_alive():
            if wanted <= 4 and _checkpoints(one) >= wanted:  # later ones wait for nothing: all six are drawn
                time.sleep(rng.uniform(0.0, 0.4))
                killed += _kill_engine(process.pid)
                wanted = _checkpoints(one) + 2  # one may be half written now
            time.sleep(0.01)
        process.join()
        assert process.exitcode == 0, one.log
        assert_same_end(one)
        runs += 1


def _checkpoints(run: Any) -> int:
    return len(list((run.run / "checkpoints").glob("rollout-*.ckpt")))


def _kill_engine(trainer: int) -> int:
    """How many it killed: one, or none where there is no engine any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(trainer).children():
            if "grpo_pl.extras.engines.child.main:main" in child.cmdline():
                child.kill()
                return 1
    return 0
