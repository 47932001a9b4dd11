"""A run that is killed again and again ends exactly like one that is not."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import CONFIG, Death
from tests.images import on_images

VISITS = {"rollout": 150, "reward": 5, "update": 5, "save": 5, "seal": 5, "validation": 5}
"""Stage -> how often a run passes it, roughly; rollouts are counted in tokens."""


def test_three_deaths_leave_no_trace(quickstart: Any, assert_same_end: Callable[[Any], None]) -> None:
    for planned in (Death("save", 2), Death("rollout", 40), Death("seal", 1)):
        assert quickstart.fit("--resume", death=planned) == -signal.SIGKILL, quickstart.log
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)
    assert "is passed over: it was never completed" in quickstart.log  # the one that died before its seal


def test_deaths_in_the_middle_of_episodes_leave_no_trace(played: Any, assert_same_end: Callable[[Any], None]) -> None:
    assert played.fit("--resume", death=Death("environment", 70)) == -signal.SIGKILL, played.log
    assert played.fit("--resume") == 0, played.log
    assert_same_end(played)


def test_deaths_in_a_cold_start_leave_no_trace(
    quickstart: Any, tmp_path: Path, assert_same_end: Callable[[Any], None]
) -> None:
    ours = replace(quickstart, cache=tmp_path / "cache")
    assert ours.fit("--resume", death=Death("cold start", 15)) == -signal.SIGKILL, ours.log
    assert [file.suffix for file in (ours.cache / "cold_start").iterdir()] == [".steps"]
    assert ours.fit("--resume") == 0, ours.log
    assert_same_end(ours)
    assert [file.suffix for file in (ours.cache / "cold_start").iterdir()] == [""]  # the result alone


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_deaths_of_a_run_on_images_leave_no_trace(
    quickstart: Any, tmp_path: Path, assert_same_end: Callable[[Any], None]
) -> None:
    seeing = replace(quickstart, configs=(on_images(CONFIG, tmp_path / "seeing.yaml"),))
    for planned in (Death("rollout", 40), Death("save", 2), Death("reward", 2), Death("seal", 1), Death("update", 2)):
        assert seeing.fit("--resume", death=planned) == -signal.SIGKILL, seeing.log
    assert seeing.fit("--resume") == 0, seeing.log
    assert_same_end(seeing)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_deaths_in_a_cold_start_leave_no_trace(
    quickstart: Any, tmp_path: Path, assert_same_end: Callable[[Any], None]
) -> None:
    """Between a step and its checkpoint, before the step, or with the checkpoint half written."""
    ours, rng = replace(quickstart, cache=tmp_path / "cache"), random.Random(0)
    for _ in range(10):
        planned = Death(rng.choice(["cold start", "update", "save"]), rng.randint(1, 5))
        assert ours.fit("--resume", death=planned) == -signal.SIGKILL, ours.log
        assert [file.suffix for file in (ours.cache / "cold_start").iterdir()] in ([], [".steps"])
    assert ours.fit("--resume") == 0, ours.log
    assert_same_end(ours)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("run", "deaths", "turns"),
    [("played", 20, 120), ("asked", 10, 300)],  # a rollout has 30 turns at least, and 96 in sessions of agents
)
def test_many_deaths_in_the_middle_of_episodes_leave_no_trace(
    request: pytest.FixtureRequest, assert_same_end: Callable[[Any], None], run: str, deaths: int, turns: int
) -> None:
    quickstart, rng = request.getfixturevalue(run), random.Random(0)
    for _ in range(deaths):
        planned = Death("environment", rng.randint(1, turns))
        assert quickstart.fit("--resume", death=planned) in (-signal.SIGKILL, 0), quickstart.log
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_planned_deaths_leaves_no_trace(
    quickstart: Any, assert_same_end: Callable[[Any], None], seed: int
) -> None:
    """Four runs of six deaths each, one in every stage, at random visits."""
    rng = random.Random(seed)
    deaths = 0
    for stage in rng.sample(sorted(VISITS), len(VISITS)):
        status = quickstart.fit("--resume", death=Death(stage, rng.randint(1, VISITS[stage] // 2)))
        assert status in (-signal.SIGKILL, 0), quickstart.log  # 0: what was left did not pass the stage so often
        deaths += status != 0
    assert deaths >= 3
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_deaths_at_random_moments_leave_no_trace(
    quickstart: Any, assert_same_end: Callable[[Any], None], seed: int
) -> None:
    """Eight kills by the clock, wherever it finds the process."""
    rng = random.Random(seed)
    begun = time.monotonic()
    assert replace(quickstart, folder=quickstart.folder.with_name("measured")).fit() == 0
    whole = time.monotonic() - begun
    for _ in range(8):
        quickstart.killed_after(rng.uniform(0.2, 0.6) * whole)
    assert quickstart.fit("--resume") == 0, quickstart.log
    assert_same_end(quickstart)
