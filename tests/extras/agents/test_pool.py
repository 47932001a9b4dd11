"""Many episodes at once: what an environment does wrong costs its own episode, and nothing is left behind."""

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from user_environments import Countdown, Refusing, Unready, Wayward

from grpo_pl.extras.agents import EnvironmentPool, PoolLimits, episode_value
from grpo_pl.extras.agents.in_threads import Threads
from grpo_pl.processes.child_process import ChildProcess
from tests.browser import until
from tests.extras.agents.turns import reset, step
from tests.process_list import gone, started_processes

LIMITS = PoolLimits(step_timeout_s=1.5, max_observation_chars=10_000, memory_limit_mb=512)
SOON_S = 120.0
"""A hang would last longer."""


def below() -> set[int]:
    return set(started_processes())


@pytest.fixture
def pool() -> Any:
    before = below()
    with EnvironmentPool(Wayward(start=5), LIMITS) as opened:
        yield opened
    assert below() <= before


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_episodes_are_played_turn_by_turn(isolation: Any) -> None:
    with EnvironmentPool(Countdown(isolation=isolation)) as pool:
        first = reset(pool, 0, 1, start=2)
        assert first[0] == first[1] and first[0].observation == "2 (seed 0)" and first[0].state == "('left', 2)"
        second = step(pool, {0: "-1", 1: "what?"})
        assert (second[0].reward, second[0].info) == (0.1, {"taken": 1}) and not second[0].done
        assert second[1].invalid_action and second[1].reward == 0.0
        assert step(pool, {0: "-1"})[0].terminated
        with pytest.raises(ValueError, match="episode 0 is not open"):
            pool.step(0, "-1")
        assert reset(pool, 0, start=4)[0].observation == "4 (seed 0)"  # the number is free again
        with pytest.raises(ValueError, match="episode 1 is open"):
            pool.reset(1, seed=0, row={})


MISDEEDS = {
    "hang": "timeout",
    "spin": "timeout",
    "raise": "raised",
    "exit": "raised",
    "leave": "killed",
    "die": "killed",
    "megabyte": "too_long",
    "gigabyte": "raised",  # out of its memory
    "number": "malformed",
    "nan": "malformed",
    "text reward": "malformed",
    "four": "malformed",
    "list state": "malformed",
    "no info": "malformed",
    "fault": "policy",
}


def test_what_goes_wrong_costs_its_episode_alone() -> None:
    """Among a hundred, with every misdeed; those that hang end within the limit."""
    before = below()
    limits = PoolLimits(step_timeout_s=3.0, max_observation_chars=10_000, memory_limit_mb=512)  # a busy machine is slow
    many = [*(action for action in MISDEEDS if action != "spin"), "-3"]
    actions = {i: many[i % len(many)] for i in range(98)} | {98: "spin", 99: "spin"}
    with EnvironmentPool(Wayward(start=5), limits) as pool:
        reset(pool, *actions)
        halfway = step(pool, dict.fromkeys(actions, "-2"))
        began = time.monotonic()
        turns = step(pool, actions)
        assert time.monotonic() - began < SOON_S
    for i, action in actions.items():
        assert (action, turns[i].status, turns[i].done) == (action, MISDEEDS.get(action, "ok"), True)
        assert "\n" not in turns[i].detail and bool(turns[i].detail) == (action != "-3")
        value = episode_value([halfway[i], turns[i]])
        assert value == {"fault": 0.2, "-3": 0.5}.get(action)  # the policy's fault: what it had earned
    assert below() <= before


def test_what_an_environment_prints_goes_nowhere(pool: EnvironmentPool, capfd: pytest.CaptureFixture[str]) -> None:
    reset(pool, 0)
    assert step(pool, {0: "print"})[0].observation == "printed"
    assert capfd.readouterr() == ("", "")


def test_a_process_that_an_environment_started_ends_with_its_episode(pool: EnvironmentPool) -> None:
    reset(pool, 0)
    grandchild = int(str(step(pool, {0: "spawn"})[0].observation))
    assert psutil.pid_exists(grandchild)
    pool.release(0)
    assert gone(grandchild)


def test_an_environment_that_cannot_be_closed_is_killed() -> None:
    before = below()
    with EnvironmentPool(Unready(), LIMITS) as pool:
        reset(pool, 0)
        inside = below() - before
        pool.release(0)
        until(lambda: len(below() & inside) == 1, SOON_S)  # the fork server stays


def test_when_the_fork_server_is_killed_its_episodes_end_and_the_next_ones_play() -> None:
    before = below()
    with EnvironmentPool(Wayward(start=5), LIMITS) as pool:
        reset(pool, 0, 1)
        pool.step(1, "hang")
        started = below() - before
        (fork_server,) = (process for process in psutil.Process().children() if process.pid in started)
        inside = {process.pid for process in fork_server.children()}
        fork_server.send_signal(signal.SIGKILL)
        assert pool.collect_all()[1].status == "killed"
        assert all(map(gone, inside))
        assert reset(pool, 2)[2].status == "ok"
        assert step(pool, {2: "-1"})[2].status == "ok"


def test_the_processes_end_with_the_one_that_uses_them_also_while_another_holds_the_channel_open() -> None:
    code = (
        "import os, time, psutil\nfrom user_environments import Wayward\n"
        "from grpo_pl.extras.agents import EnvironmentPool\n"
        "pool = EnvironmentPool(Wayward())\n"
        "for i in range(3): pool.reset(i, seed=0, row={})\n"
        "pool.collect_all()\n"
        "pool.step(0, 'spin')\n"
        "pids = [p.pid for p in psutil.Process().children(recursive=True)]\n"
        "if holder := os.fork(): print(holder, *pids, flush=True)\n"
        "time.sleep(3600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    user = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert user.stdout is not None
    holder, *pids = [int(word) for word in user.stdout.readline().split()]
    user.kill()
    user.wait()
    assert len(pids) == 4 and all(map(gone, pids))
    os.kill(holder, signal.SIGKILL)
    user.communicate()


def test_a_step_that_hangs_holds_up_no_other_and_may_be_the_policys_fault() -> None:
    with EnvironmentPool(Wayward(start=5, blame="policy"), LIMITS) as pool:
        reset(pool, 0, 1)
        halfway = step(pool, {0: "-2"})[0]
        pool.step(0, "hang")
        pool.step(1, "-1")
        assert set(pool.collect()) == {1}
        assert pool.collect(timeout_s=0) == {}
        hung = pool.collect()[0]
        assert hung.status == "timeout" and episode_value([halfway, hung]) == 0.2  # what was earned before
        assert pool.collect() == {}  # nothing is under way


def test_a_thread_that_hangs_is_replaced() -> None:
    before = threading.active_count()
    limits = PoolLimits(step_timeout_s=0.3, threads=1)
    gate = threading.Event()
    with EnvironmentPool(Gated(gate=gate, isolation="thread"), limits) as pool:
        reset(pool, 0, 1, 2)
        pool.step(0, "wait")
        pool.step(1, "-1")
        turns = pool.collect_all()
        assert (turns[0].status, turns[1].status) == ("timeout", "ok")
        assert step(pool, {2: "-1"})[2].status == "ok"
        gate.set()
    until(lambda: threading.active_count() <= before, SOON_S)


def test_an_episode_that_hung_is_closed_once_its_step_returns() -> None:
    gate, closed = threading.Event(), threading.Event()
    with EnvironmentPool(
        Gated(gate=gate, closed=closed, isolation="thread"), PoolLimits(step_timeout_s=0.3, threads=1)
    ) as pool:
        reset(pool, 0)
        assert step(pool, {0: "wait"})[0].status == "timeout" and not closed.is_set()
        assert reset(pool, 0)[0].status == "ok"  # the number is free, and the late thread leaves its episode alone
        gate.set()
        assert closed.wait(SOON_S)
        assert step(pool, {0: "-1"})[0].status == "ok"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_pool_that_was_closed_plays_again(isolation: Any) -> None:
    pool = EnvironmentPool(Countdown(isolation=isolation))
    for _ in range(2):
        assert reset(pool, 0, start=2)[0].observation == "2 (seed 0)"
        pool.step(0, "-1")  # never collected
        pool.close()


def test_what_could_not_begin_is_forgotten_with_the_pool(tmp_path: Path) -> None:
    """Else the episode of that number would be told so after the pool was used again."""
    file, others = tmp_path / "there", below()
    pool = EnvironmentPool(Refusing(file=str(file)))
    pool.start()
    (fork_server,) = below() - others
    os.kill(fork_server, signal.SIGKILL)
    assert gone(fork_server)
    file.touch()
    channels = psutil.Process().num_fds()
    for episode in range(8):
        pool.reset(episode, seed=7, row={})
    assert psutil.Process().num_fds() < channels + 6  # some may belong to others in this process
    pool.close()
    file.unlink()
    assert reset(pool, 0, start=2)[0].observation == "2 (seed 0)"
    assert step(pool, {0: "-1"})[0].status == "ok"
    pool.close()


def test_a_step_that_waits_when_its_pool_is_closed_is_not_played_and_its_environment_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = threading.Event()
    monkeypatch.setattr(Threads, "_add_thread", lambda self: None)  # none is free
    runner = Threads(Gated(closed=closed, isolation="thread"), LIMITS)
    runner.environments[0], tasks = runner.prototype.fresh(), runner._tasks
    runner.submit(0, "step", {"action": "-1"})
    runner.close()
    assert closed.is_set()
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runner._serve(tasks, ended)
    assert ended.empty()


def test_an_answer_that_json_cannot_say_costs_its_episode_alone(pool: EnvironmentPool) -> None:
    reset(pool, 0, 1)
    turns = step(pool, {0: "set", 1: "-1"})
    assert (turns[0].status, turns[0].blame, turns[1].status) == ("malformed", "environment", "ok")
    assert "JSON" in turns[0].detail


def test_an_answer_that_was_there_before_the_step_is_none(pool: EnvironmentPool) -> None:
    reset(pool, 0, 1)
    assert step(pool, {0: "forge"})[0].observation == "own"
    assert select.select([pool._runner.episodes[0].socket], [], [], SOON_S)[0]  # type: ignore[union-attr]  # it is there
    turns = step(pool, {0: "-1", 1: "-1"})
    assert (turns[0].status, turns[0].blame, turns[1].status) == ("malformed", "environment", "ok")


def test_a_fork_server_that_is_stuck_at_its_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while what it is sent is more than the kernel takes."""
    before = below()

    def stopped(*arguments: Any, **options: Any) -> ChildProcess:
        process = ChildProcess(*arguments, **options)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr("grpo_pl.extras.agents.in_processes.ChildProcess", stopped)
    monkeypatch.setattr("grpo_pl.processes.child_process.START_LIMIT_S", 0.5)
    with pytest.raises(ValueError, match=r"^the process for Refusing did not start within 0.5 s\.$"):
        EnvironmentPool(Refusing(file="x" * 2**21)).start()
    assert below() <= before


def test_settings_that_an_environment_refuses_are_refused_before_the_first_episode() -> None:
    for isolation in ("thread", "process"):
        with pytest.raises(ValueError, match=r"^start must not be negative, got -1\.$"):
            EnvironmentPool(Unready(start=-1, isolation=isolation)).start()


def test_an_environment_that_no_other_process_can_find_is_refused() -> None:
    @dataclass(kw_only=True)
    class Local(Countdown):
        pass

    with pytest.raises(ValueError, match="top of a module"):
        EnvironmentPool(Local()).start()


def test_an_environment_of_the_script_that_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Countdown, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"Countdown cannot be sent .*\(it stands in the script that runs\): put it"):
        EnvironmentPool(Countdown()).start()


@pytest.mark.parametrize("field", ["step_timeout_s", "threads", "max_observation_chars"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be positive"):
        PoolLimits(**{field: 0})


@dataclass(kw_only=True)
class Gated(Countdown):
    gate: Any = None
    closed: Any = None

    def close(self) -> None:
        if self.closed is not None:
            self.closed.set()

    def step(self, action: str) -> Any:
        if action == "wait":
            self.gate.wait()
        return super().step("-1")
