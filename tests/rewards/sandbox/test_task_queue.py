"""Several callers of one pool: whose pair is judged next, and what happens to the pairs of those who leave."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest

from grpo_pl.rewards.sandbox.pool import SandboxSettings, WorkerPool
from grpo_pl.rewards.sandbox.task_queue import CALLER, Caller, Job, Task, TaskQueue, Verdict, looks_costly

ENDLESS = r"9^{9^{9^{9}}}"
LOOPS = """
def judge(gold, answer, relative_tolerance):
    while "9^{9" in answer or "gcd" in answer:
        pass
    return ("ok" if sorted(gold.split("+")) == sorted(answer.split("+")) else "wrong"), ""
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    """Patient; its one worker starts at once."""
    (tmp_path / "loops.py").write_text(LOOPS)
    pool = WorkerPool(
        SandboxSettings(soft_limit_s=300.0, hard_limit_s=600.0, workers=1, judge=str(tmp_path / "loops.py"))
    )
    yield pool
    pool.close()


def _run(threads: ThreadPoolExecutor, caller: Caller, pool: WorkerPool, *jobs: Job) -> Future[list[Verdict]]:
    def judge() -> list[Verdict]:
        CALLER.set(caller)
        return pool.run(jobs)

    return threads.submit(copy_context().run, judge)


def _wait_until_judged(caller: Caller, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not any(task.kill for task in caller.tasks):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_callers_take_turns_and_what_is_costly_waits() -> None:
    turns, ann, bob = TaskQueue(), Caller(), Caller()
    for name, caller, slow in (
        ("a1", ann, False),
        ("a2", ann, False),
        ("a3", ann, True),
        ("b1", bob, False),
        ("b2", bob, True),
        ("a4", ann, False),
    ):
        turns.put(Task((name, ""), caller=caller, slow=slow))
    first = turns.take(slow_first=True, quick_only=False)
    assert first is not None and first.job[0] == "a3"
    quick = [turns.take(slow_first=False, quick_only=True) for _ in range(4)]
    assert [task.job[0] for task in quick if task is not None] == ["a1", "b1", "a2", "a4"]
    last = turns.take(slow_first=False, quick_only=False)
    assert last is not None and last.job[0] == "b2"
    turns.close()
    assert turns.take(slow_first=True, quick_only=False) is None


def test_a_pair_that_turns_out_slow_while_the_pool_closes_is_still_judged() -> None:
    turns, slow = TaskQueue(), Task(("a", ""), slow=True)
    turns.put(slow)
    turns.close()  # the threads of all other workers may have ended
    assert turns.take(slow_first=False, quick_only=True) is slow
    assert turns.take(slow_first=False, quick_only=True) is None


@pytest.mark.parametrize(
    ("formula", "costly"),
    [
        ("x^2+y^2", False), (r"\frac{1}{2}", False), ("2^{10}", False), ("5!", False), (r"\binom{10}{3}", False),
        ("1234567", False), ("9^{9^{9^9}}", True), ("(20!)!", True), ("100000000!", True), ("(x+y+2)^{2000}", True),
        (r"\prod_{i=1}^{9} i", True), (r"\binom{10^9}{5}", True), ("^" * 10**6, True),
    ],
)  # fmt: skip
def test_a_formula_is_costly_by_its_looks(formula: str, costly: bool) -> None:
    began = time.monotonic()
    assert looks_costly(formula) is costly
    assert time.monotonic() - began < 1.0


def test_a_pair_that_only_proves_costly_makes_way(pool: WorkerPool) -> None:
    """It looks harmless, takes ten minutes, and there is no worker but the two that begin with it and its like."""
    hostile, honest = Caller(), Caller()
    harmless = [("5", rf"\gcd({i},7)^{{99}}+(1+\sqrt{{2}}+x+y+z)^{{99}}") for i in range(4)]
    assert not any(looks_costly(answer) for _, answer in harmless)
    with ThreadPoolExecutor(2) as threads:
        bombs = _run(threads, hostile, pool, *harmless)
        _wait_until_judged(hostile)
        assert _run(threads, honest, pool, ("x+1", "1+x")).result(60) == [Verdict("ok")]
        hostile.leave()
        with pytest.raises(CancelledError):
            bombs.result(60)


def test_costly_pairs_hold_up_no_other_caller_and_are_forgotten_when_theirs_leaves(pool: WorkerPool) -> None:
    hostile, honest = Caller(), Caller()
    with ThreadPoolExecutor(2) as threads:
        bombs = _run(threads, hostile, pool, *(("5", f"{ENDLESS}+{i}") for i in range(20)))
        _wait_until_judged(hostile)
        verdicts = _run(threads, honest, pool, ("x+1", "1+x"), ("x+1", "x+2")).result(60)
        assert verdicts == [Verdict("ok"), Verdict("wrong")] and not bombs.done()
        hostile.leave()
        with pytest.raises(CancelledError):
            bombs.result(60)
        assert _run(threads, honest, pool, ("x^{1000}", "x^{1000}+1")).result(60) == [Verdict("wrong")]
        with pytest.raises(CancelledError):
            _run(threads, hostile, pool, ("5", "6+x")).result(60)
    assert not hostile.tasks


def test_many_callers_who_come_and_go_leave_nothing_behind(pool: WorkerPool) -> None:
    pool.start()
    lock, ended = threading.Lock(), []

    def visit(i: int) -> None:
        caller = Caller()
        CALLER.set(caller)
        leaving = threading.Timer(0.01 * (i % 5), caller.leave)
        leaving.start()
        try:
            verdicts = pool.run([(f"x+{i}", f"{i}+x"), ("5", f"{ENDLESS}+{i}")] if i % 2 else [(f"x+{i}", f"{i}+x")])
            assert verdicts == [Verdict("ok")]
        except CancelledError:
            pass
        leaving.join()
        with lock:
            ended.append(caller)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: copy_context().run(visit, i), range(24)))
    assert len(ended) == 24
    honest = Caller()
    with ThreadPoolExecutor(1) as threads:
        assert _run(threads, honest, pool, ("x+1", "1+x")).result(60) == [Verdict("ok")]
    assert not any(caller.tasks for caller in ended)
