import ast
import copy
import functools
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import grpo_pl
from grpo_pl.rewards import MathReward
from grpo_pl.rewards.sandbox.pool import SandboxSettings, Verdict, WorkerPool, WorkerStartError
from tests.process_list import lives

JOBS = [(f"x^{{{i}}}+1", f"1+x^{{{i if i % 3 else i + 1}}}") for i in range(1, 31)]
EXPECTED = ["ok" if i % 3 else "wrong" for i in range(1, 31)]


SORTS = """
import time

def judge(gold, answer, relative_tolerance):
    time.sleep(0.01 * gold.startswith("0"))
    if answer == "late":
        return "timeout", ""
    return ("ok" if sorted(gold.split("+")) == sorted(answer.split("+")) else "wrong"), ""
"""
"""A judge for JOBS, whose workers start at once: they need no algebra."""


PoolOf = Callable[..., WorkerPool]


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[PoolOf]:
    """Makes pools, by default of one worker, whose judge has this source; without one it is that of mathematics."""
    pools: list[WorkerPool] = []

    def make(source: str = "", **settings: Any) -> WorkerPool:
        if source:
            (tmp_path / "judge.py").write_text(source)
            settings["judge"] = str(tmp_path / "judge.py")
        pools.append(WorkerPool(SandboxSettings(**{"workers": 1, **settings})))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def light_pool(pool_of: PoolOf) -> WorkerPool:
    """Its workers start at once."""
    return pool_of(SORTS, soft_limit_s=0.5, hard_limit_s=10.0, workers=2)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Shared by tests that end none of them."""
    judge = tmp_path_factory.mktemp("judge") / "sorts.py"
    judge.write_text(SORTS)
    pool = WorkerPool(SandboxSettings(judge=str(judge), soft_limit_s=0.5, hard_limit_s=10.0))
    pool.start()
    yield pool
    pool.close()


@pytest.fixture
def shared(workers: WorkerPool) -> WorkerPool:
    """A running pool that remembers no verdict."""
    workers._cache.clear()
    return workers


def statuses(verdicts: list[Verdict]) -> list[str]:
    return [verdict.status for verdict in verdicts]


def wait_until_gone(pids: list[int], seconds: float = 120.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_verdicts_keep_the_order_of_the_jobs(shared: WorkerPool) -> None:
    assert statuses(shared.run(JOBS)) == EXPECTED
    assert statuses(shared.run(JOBS[::-1])) == EXPECTED[::-1]
    assert shared.run([]) == []


def test_equal_jobs_are_judged_once(shared: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    submit = shared._threads.submit
    monkeypatch.setattr(shared._threads, "submit", lambda job, *rest: sent.append(job) or submit(job, *rest))
    assert statuses(shared.run([JOBS[0], JOBS[1], JOBS[0]] * 5)) == ["ok"] * 15
    assert sent == JOBS[:2]
    shared.run(JOBS[:3])
    assert sent == JOBS[:3]


def test_what_may_take_long_begins_first(shared: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    submit = shared._threads.submit
    monkeypatch.setattr(shared._threads, "submit", lambda job, *rest: sent.append(job[1]) or submit(job, *rest))
    jobs = [("5", answer) for answer in ("2", r"\sqrt{2}", "2^{3}", r"\binom{5}{2}!^2", "3", "5!")]
    assert statuses(shared.run(jobs)) == ["wrong"] * 6
    assert sent == [r"\binom{5}{2}!^2", "2^{3}", "5!", "2", r"\sqrt{2}", "3"]


def test_the_cache_forgets_the_oldest_and_never_keeps_timeouts(pool_of: PoolOf) -> None:
    pool = pool_of(SORTS, cache_size=2)
    assert statuses(pool.run([*JOBS[:3], ("x", "late")])) == [*EXPECTED[:3], "timeout"]
    assert list(pool._cache) == JOBS[1:3]


def test_workers_killed_from_outside_mid_batch_lose_nothing(light_pool: WorkerPool) -> None:
    light_pool.start()
    first = light_pool.pids
    jobs = [(f"0+{i}", f"{i}+0") for i in range(100)]  # of 10 ms each
    killers = [threading.Timer(0.05 + 0.2 * i, os.kill, (pid, signal.SIGKILL)) for i, pid in enumerate(first)]
    for killer in killers:
        killer.start()
    verdicts = light_pool.run(jobs)
    for killer in killers:
        killer.join()
    assert statuses(verdicts) == ["ok"] * len(jobs)
    assert wait_until_gone(first) == []


def test_a_worker_killed_while_idle_is_replaced(light_pool: WorkerPool) -> None:
    light_pool.start()
    for pid in light_pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert statuses(light_pool.run(JOBS)) == EXPECTED


ALLOCATES = """
def judge(gold, answer, relative_tolerance):
    return "ok", str(len(bytearray(int(answer))))
"""


def test_memory_is_limited_and_what_needs_more_costs_its_own_job_alone(pool_of: PoolOf) -> None:
    pool = pool_of(ALLOCATES, memory_limit_mb=512)
    pool.start()
    limits = Path(f"/proc/{pool.pids[0]}/limits").read_text()
    (address_space,) = re.findall(r"Max address space +(\d+)", limits)
    (core,) = re.findall(r"Max core file size +(\d+)", limits)
    assert (int(address_space), int(core)) == (512 * 2**20, 0)
    assert pool.run([("", f"{10**9}")]) == [Verdict("crashed", "over 512 MB")]
    assert pool.run([("", "1000")]) == [Verdict("ok", "1000")]


def test_closing_ends_the_workers_and_a_closed_pool_starts_again(light_pool: WorkerPool) -> None:
    light_pool.start()
    pids = light_pool.pids
    light_pool.close()
    assert [pid for pid in pids if lives(pid)] == []
    assert light_pool.pids == []
    assert statuses(light_pool.run(JOBS[:2])) == ["ok", "ok"]


def test_a_dropped_pool_ends_its_workers(light_pool: WorkerPool) -> None:
    pool = WorkerPool(light_pool.settings)
    pool.start()
    pids = pool.pids
    del pool
    assert wait_until_gone(pids) == []


def test_many_threads_share_a_pool(shared: WorkerPool) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: statuses(shared.run(JOBS[i:])), range(16)))
    assert results == [EXPECTED[i:] for i in range(16)]


def score_in_child(reward: MathReward, queue: multiprocessing.Queue) -> None:
    scores = reward([r"\boxed{1+x}", r"\boxed{x+2}"], ["x+1", "x+1"], {})
    queue.put(([s.value for s in scores], reward.pool.pids))
    reward.close()


def test_a_forked_child_gets_workers_of_its_own() -> None:
    reward = MathReward(workers=1)
    reward.pool.start()
    mine = reward.pool.pids
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=score_in_child, args=(reward, queue), daemon=True)
    child.start()
    values, theirs = queue.get(timeout=60)
    child.join()
    assert values == [1.0, 0.0]
    assert len(theirs) == len(mine) == 1
    assert not set(mine) & set(theirs)
    assert wait_until_gone(theirs) == []
    assert reward.pool.pids == mine
    assert reward([r"\boxed{1+x}"], ["x+1"], {})[0].value == 1.0
    reward.close()


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_a_daemonic_process_pool_scores(method: str) -> None:
    reward = MathReward(workers=1)
    with multiprocessing.get_context(method).Pool(1) as processes:
        scores = processes.apply(reward, ([r"\boxed{1+x}", r"\boxed{x+2}"], ["x+1", "x+1"], {}))
    assert [score.value for score in scores] == [1.0, 0.0]


@pytest.mark.slow  # daemonic processes that are forked or spawned, as those above
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_score(method: str) -> None:
    from torch.utils.data import DataLoader

    reward = MathReward(workers=1)
    reward.pool.start()
    loader = DataLoader(
        [r"\boxed{1+x}", r"\boxed{x+2}"],  # type: ignore[arg-type]
        num_workers=1,
        collate_fn=functools.partial(reward, answers=["x+1"], columns={}),
        multiprocessing_context=method,
    )
    assert [score.status for (score,) in loader] == ["ok", "wrong"]
    reward.close()


def test_a_pool_survives_pickle_and_deepcopy_without_its_workers(light_pool: WorkerPool) -> None:
    light_pool.start()
    for twin in (pickle.loads(pickle.dumps(light_pool)), copy.deepcopy(light_pool)):
        assert twin.settings == light_pool.settings
        assert twin.pids == []


WAITS = """
import subprocess, time

def judge(gold, answer, relative_tolerance):
    if answer:
        program = subprocess.Popen(["sleep", "600"])
        with open(answer, "w") as file:
            print(program.pid, file=file)
        time.sleep(600)
    return "ok", ""
"""
COUNTS = """
def judge(gold, answer, relative_tolerance):
    with open(answer, "w") as file:
        print(file=file)
    sum(range(10**12))
"""
"""In C, which handles no signals."""
PARENT = """
import sys, threading, time
from pathlib import Path
from grpo_pl.rewards.sandbox.pool import SandboxSettings, WorkerPool
limits = {"soft_limit_s": 0.8, "hard_limit_s": 1.0, "wall_factor": 600.0}
pool = WorkerPool(SandboxSettings(workers=2, judge=sys.argv[1], **limits))
pool.start()
threading.Thread(target=pool.run, args=([("", sys.argv[2])],), daemon=True).start()
while not (Path(sys.argv[2]).exists() and Path(sys.argv[2]).read_text().endswith("\\n")):
    time.sleep(0.02)
print(*pool.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("source", "number"), [(COUNTS, signal.SIGKILL), (WAITS, signal.SIGTERM)], ids=["busy", "waits"]
)
def test_workers_end_with_their_parent(tmp_path: Path, source: str, number: signal.Signals) -> None:
    """One is idle. The other is busy until its own CPU timers end it; or it waits, with a program that its job has
    started, where no CPU time passes. A signal to the parent's group reaches none of them."""
    judge, file = tmp_path / "judge.py", tmp_path / "program"
    judge.write_text(source)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(judge), str(file)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in [*parent.stdout.readline().split(), *file.read_text().split()]]
    assert len(pids) == 2 + (source == WAITS) and all(map(lives, pids))
    os.killpg(parent.pid, number)
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(pids) == []


def test_a_worker_deaf_to_the_soft_limit_is_killed_with_what_it_started_and_replaced(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    file, pool = tmp_path / "program", pool_of(WAITS, soft_limit_s=0.4, hard_limit_s=0.5, wall_factor=2.0)
    pool.start()
    (pid,) = pool.pids
    assert pool.run([("", str(file))]) == [Verdict("killed", "over 0.5 s")]
    assert pool.kills == 1
    assert wait_until_gone([pid, int(file.read_text())]) == []
    assert statuses(pool.run([("", "")])) == ["ok"]


FORGES = """
import json, os, struct

WORST = {"not json": b"{", "no reply": b"[]", "empty": b"{}", "deep": b"[" * 100000}

def tell(message):
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                os.write(descriptor, struct.pack("!Q", len(message)) + message)
        except OSError:
            pass

def judge(gold, answer, relative_tolerance):
    if answer in WORST:
        tell(WORST[answer])
    elif answer == "ahead":
        tell(json.dumps({"key": "0", "status": "ok", "detail": "forged", "last": False}).encode())
        return "ok", "own"
    elif answer == "once":
        if not os.path.exists(gold):
            open(gold, "w").close()
            tell(b"{")
    elif answer == "endless":
        message = struct.pack("!Q", 2**62)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                while os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                    os.write(descriptor, message * 2**10)
            except OSError:
                pass
    return "wrong", answer
"""


@pytest.fixture
def forging(pool_of: PoolOf) -> WorkerPool:
    return pool_of(FORGES, cache_size=0)


@pytest.mark.parametrize("answer", ["not json", "no reply", "empty", "deep", "endless"])
def test_what_is_no_reply_costs_its_own_job_alone(forging: WorkerPool, answer: str) -> None:
    (verdict,) = forging.run([("", answer)])
    assert verdict.status == "crashed" and "no reply to this job" in verdict.detail
    assert forging.run([("", "good")]) == [Verdict("wrong", "good")]


def test_a_reply_that_was_there_before_its_job_is_none(forging: WorkerPool) -> None:
    """Neither the verdict of the job that wrote it nor that of the next; a job after it has its own."""
    assert forging.run([("", "ahead")])[0] != Verdict("ok", "forged")
    for answer in ("good", "better"):
        assert forging.run([("", answer)]) == [Verdict("wrong", answer)]


def test_a_job_is_tried_again_where_an_earlier_one_may_be_to_blame(forging: WorkerPool, tmp_path: Path) -> None:
    assert forging.run([(str(tmp_path / "there"), "once")]) == [Verdict("wrong", "once")]


def test_importing_the_judge_of_mathematics_changes_nothing_in_this_process() -> None:
    from grpo_pl.rewards.sandbox import math_judge

    assert logging.root.manager.disable == logging.NOTSET
    assert math_judge.factorials._gmpy is None or math_judge.factorials._gmpy.__name__ == "gmpy2"


def test_a_module_next_to_the_judge_cannot_shadow_a_library(
    pool_of: PoolOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_pl.rewards.sandbox import math_judge

    for name in ("sympy", "json", "grpo_pl"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert statuses(pool_of(Path(math_judge.__file__).read_text()).run(JOBS[:1])) == ["ok"]


BARE = "import sys; print(*sys.modules)"
TELLS = """
import sys

def judge(gold, answer, relative_tolerance):
    return "ok", repr((sorted(sys.modules), sys.path))
"""


def test_a_worker_brings_neither_torch_nor_rewards_with_it(pool_of: PoolOf) -> None:
    """Its start costs a judge and SymPy; and what it has loaded is what programs could look at."""
    (verdict,) = pool_of(TELLS).run([("", "")])
    modules, path = ast.literal_eval(verdict.detail)
    bare = subprocess.run([sys.executable, "-P", "-c", BARE], capture_output=True, text=True, check=True).stdout.split()
    added = {name for name in modules if name.partition(".")[0] not in {*sys.stdlib_module_names, *bare}}
    assert {name for name in added if not name.startswith("grpo_pl_file_")} == {
        "grpo_pl",
        *(f"grpo_pl.{name}" for name in ("moved", "processes", "rewards", "rewards.sandbox", "rewards.sandbox.worker")),
        *(f"grpo_pl.processes.{name}" for name in ("channel", "modules", "resource_limits")),
    }
    assert not any(folder.startswith(os.path.dirname(grpo_pl.__file__)) for folder in path)


def test_the_judge_of_mathematics_needs_neither_torch_nor_the_rewards() -> None:
    code = (
        "import sys; from grpo_pl.rewards.sandbox import worker, math_judge; math_judge.prepare();"
        "print(*[m for m in sys.modules if m.partition('.')[0] in ('torch', 'transformers', 'lightning', 'numpy')],"
        " *[m for m in sys.modules if m in ('grpo_pl.rewards.base', 'grpo_pl.types', 'grpo_pl.functional')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_worker_that_cannot_start_is_reported(pool_of: PoolOf) -> None:
    with pytest.raises(WorkerStartError, match="no_such_library"):
        pool_of("import no_such_library").run(JOBS[:1])
    with pytest.raises(WorkerStartError, match="exit status 3"):
        pool_of("raise SystemExit(3)").start()


def test_a_worker_that_cannot_be_replaced_is_not_the_completions_fault(pool_of: PoolOf) -> None:
    pool = pool_of("def judge(*_): return 'ok', ''", workers=2)
    pool.start()
    Path(pool.settings.judge).write_text("raise SystemExit(3)")
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert statuses(pool.run(JOBS[:2])) == ["unavailable"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands the peak of memory on to children")
def test_workers_of_a_large_process_live_on() -> None:
    code = (
        "ballast = bytearray(b'1') * (400 * 2**20)\n"
        "from grpo_pl.rewards.sandbox.pool import SandboxSettings, WorkerPool\n"
        "pool = WorkerPool(SandboxSettings(workers=1, memory_limit_mb=512))\n"
        "pool.run([('x+1', '1+x')])\n"
        "first = pool.pids\n"
        "for i in range(3):\n"
        "    assert pool.run([(f'x+{i}', f'{i}+x')])[0].status == 'ok'\n"
        "assert pool.pids == first, 'a worker was replaced'\n"
        "pool.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


_PRINT_WORKERS = "from grpo_pl.rewards import MathReward; print(MathReward().workers)"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here")
def test_there_are_two_workers_but_one_where_a_single_core_may_be_used() -> None:
    cores = sorted(os.sched_getaffinity(0))
    for bound in (cores, cores[:1]):
        code = f"import os; os.sched_setaffinity(0, {bound}); {_PRINT_WORKERS}"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(found.stdout) == min(2, len(bound))
