"""Processes that a launcher started do not outlive it; others may."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process_list import lives

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1"}
LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0", "MASTER_PORT": "1"}
BY_HAND = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_PORT": "1"}
RANK = """
import sys, time
from grpo_pl.distributed import orphans
{before}
orphans.LOOK_EVERY_S = 0.05
orphans.end_with_launcher()
open(sys.argv[1], "w").write("ready")
{busy}
"""
LAUNCHER = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[2:])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
TEN_LOOKS = 0.5
"""Seconds in which a rank of these tests looks ten times for its launcher."""
SLEEP = "time.sleep(600)"
COMPUTE = "while True: sum(range(10_000_000))"


def _wait_for(condition: Callable[[], bool], seconds: float = 200.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
    """``launch(environment, …)``: process ids of a launcher and of the rank that it started."""
    started: list[int] = []
    plain = {name: value for name, value in os.environ.items() if name not in {**TORCHRUN, **LIGHTNING, **BY_HAND}}

    def start(
        environment: dict[str, str], *, before: str = "", busy: str = SLEEP, wrapped: bool = False, wait: bool = True
    ) -> tuple[int, int]:
        rank = [sys.executable, "-c", RANK.format(before=before, busy=busy), str(tmp_path / "ready")]
        if wrapped:
            rank = ["sh", "-c", '"$@"; exit', "sh", *rank]
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(tmp_path / "pid"), *rank], env={**plain, **environment}
        )
        assert _wait_for(lambda: (tmp_path / ("ready" if wait else "pid")).exists())
        child = int((tmp_path / "pid").read_text())
        if wrapped:
            child = int(Path(f"/proc/{child}/task/{child}/children").read_text().split()[0])
        started.extend((launcher.pid, child))
        return launcher.pid, child

    yield start
    for pid in started:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("environment", "busy"),
    [
        pytest.param(TORCHRUN, SLEEP, id="torchrun-waiting"),
        pytest.param(LIGHTNING, COMPUTE, id="lightning-computing"),
        pytest.param(TORCHRUN, COMPUTE, id="torchrun-computing", marks=pytest.mark.slow),
        pytest.param(LIGHTNING, SLEEP, id="lightning-waiting", marks=pytest.mark.slow),
    ],
)
def test_a_rank_ends_soon_after_its_launcher_is_killed(
    launch: Callable[..., tuple[int, int]], environment: dict[str, str], busy: str
) -> None:
    launcher, rank = launch(environment, busy=busy)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert _wait_for(lambda: not lives(rank))


def test_a_script_between_them_makes_no_difference(launch: Callable[..., tuple[int, int]]) -> None:
    launcher, rank = launch(TORCHRUN, wrapped=True)
    time.sleep(TEN_LOOKS)
    assert lives(rank)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert _wait_for(lambda: not lives(rank))


@pytest.mark.parametrize("environment", [{}, BY_HAND], ids=["alone", "ranks by hand"])
def test_what_a_person_started_outlives_the_shell(
    launch: Callable[..., tuple[int, int]], environment: dict[str, str]
) -> None:
    launcher, rank = launch(environment)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    time.sleep(TEN_LOOKS)
    assert lives(rank)


@pytest.mark.slow
def test_a_run_of_torchrun_ends_with_it_workers_and_all(tmp_path: Path) -> None:
    """The real ones: two ranks and the workers of their rewards."""
    five = Path(__file__).with_name("five.yaml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "grpo_pl"]
    reward = "{class_path: grpo_pl.rewards.MathReward, init_args: {correctness: true}}"
    fit = ["fit", f"--config={five}", "--config=configs/strategy/fsdp.yaml", f"--runs_dir={tmp_path}"]
    fit += [f"--model.rewards=[{reward}]"]
    environment = {**os.environ, "GRPO_PL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    log = (tmp_path / "log").open("w")
    torchrun = subprocess.Popen([*command, *fit, "--data.steps=2000"], env=environment, stdout=log, stderr=log)
    try:
        metrics = tmp_path / "five" / "metrics.csv"
        trains = lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2  # noqa: E731
        assert _wait_for(lambda: trains() or torchrun.poll() is not None), (tmp_path / "log").read_text()
        # two ranks, each with workers, which start with the first answer that needs one
        assert _wait_for(lambda: len(_descendants(torchrun.pid)) >= 4), (tmp_path / "log").read_text()
        family = _descendants(torchrun.pid)
    finally:
        torchrun.kill()
        torchrun.wait()
    ended = _wait_for(lambda: not any(map(lives, family)))
    left = [pid for pid in family if lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert ended, left


def _descendants(pid: int) -> list[int]:
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [*children, *(inner for child in children for inner in _descendants(child))]
