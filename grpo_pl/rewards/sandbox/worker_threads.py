"""The worker processes of a ``WorkerPool``, and the threads that send them jobs."""

from __future__ import annotations

import json
import math
import secrets
import signal
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_args

from grpo_pl.functional.argument_checks import check_at_least, check_positive
from grpo_pl.processes.child_process import ChildProcess, ChildStartError, exit_name
from grpo_pl.processes.variables import clean_environment
from grpo_pl.rewards.base import Status
from grpo_pl.rewards.sandbox.task_queue import Caller, Job, Task, TaskQueue, Verdict, looks_costly

LONGEST_REPLY = 64 << 20
"""Most bytes of a reply, which also untrusted code could write: the output of a program, as JSON inside JSON."""
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
"""Signals that a worker does not send itself: another process or the kernel ended it."""
MAX_ATTEMPTS = 3
"""Attempts per pair whose worker is ended from outside or breaks the protocol; then the pair itself is blamed, as the
system may have run out of memory on it each time."""
SHORT_S, SHORT_HARD_S = 0.15, 0.4
"""Soft and hard limit of the first attempt at a pair of one of several callers, in CPU seconds."""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Limits of one worker pool."""

    workers: int = 2
    """Worker processes."""
    soft_limit_s: float = 1.0
    """CPU seconds after which a comparison is interrupted (status ``timeout``)."""
    hard_limit_s: float = 1.5
    """CPU seconds after which a worker that ignores the interruption is killed (status ``killed``)."""
    wall_factor: float = 6.0
    """Wall-clock limit of a job, in multiples of ``hard_limit_s``, after which its worker is killed: on a busy machine
    CPU time takes longer by the clock."""
    memory_limit_mb: int = 2048
    """Address space of one worker (``RLIMIT_AS``) in MiB."""
    relative_tolerance: float = 1e-4
    """Largest |answer − gold| / |gold| of two equal numbers."""
    cache_size: int = 65_536
    """Verdicts remembered across batches."""
    judge: str = "grpo_pl.rewards.sandbox.math_judge"
    """Module, or absolute path of a file, with a ``judge(gold, answer, relative_tolerance)`` that returns (status,
    detail). Its ``prepare()``, if it has one, runs at the start of a worker; without one the first job pays for what
    the judge does only once."""
    data: str = ""
    """Argument of ``prepare``; it gets none where this is empty."""

    def __post_init__(self) -> None:
        check_at_least(1, "the sandbox", workers=self.workers, wall_factor=self.wall_factor)
        check_at_least(0, "the sandbox", cache_size=self.cache_size)
        check_at_least(512, "the sandbox", memory_limit_mb=self.memory_limit_mb)  # which SymPy takes
        check_positive(soft_limit_s=self.soft_limit_s, hard_limit_s=self.hard_limit_s, wall_factor=self.wall_factor)
        if self.hard_limit_s <= self.soft_limit_s:
            raise ValueError(f"hard_limit_s must exceed soft_limit_s={self.soft_limit_s}, got {self.hard_limit_s}.")


class WorkerStartError(RuntimeError):
    """A worker could not be started: a broken installation or a machine out of resources."""


class Reply(NamedTuple):
    """What a worker says of a job, or what became of the worker over it."""

    status: Status
    detail: str
    ended: bool = False
    """The worker has ended, or is killed because it is late or sent what is no reply to this job."""
    again: bool = False
    """Another than this job may be to blame, so it is tried again."""


class Worker:
    """One child process; used by one thread only.

    Raises:
        WorkerStartError: the process ended at start, did not report in time, or could not load the judge.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        # The order of SymPy's terms, and with it a verdict, depends on hashes. By default glibc reserves 64 MiB of the
        # worker's address space for its second thread.
        environment = clean_environment() | {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
        self.process = ChildProcess("grpo_pl.rewards.sandbox.worker:main", environment=environment)
        try:
            fault = self.process.start(json.dumps(asdict(settings)).encode("ascii"))
        except ChildStartError as error:
            raise WorkerStartError(f"the sandbox worker {error}.") from None
        if fault:
            self.process.close()
            raise WorkerStartError(f"the sandbox worker could not start {settings.judge}: {fault}")

    def ask(self, job: list[Any], limit_s: float) -> Reply:
        """Sends a job and returns what came of it; ``killed`` where the hard limit ended the worker, or it did not
        answer within ``limit_s`` seconds of the clock."""
        channel = self.process.channel
        key = secrets.token_hex(8)  # which code in the worker cannot know before: no reply is one to a later job
        try:
            text = channel.ask(json.dumps([key, *job]).encode("ascii"), limit_s, longest=LONGEST_REPLY)
            said = json.loads(text)
            if said["key"] != key or said["status"] not in get_args(Status):
                raise ValueError("it is one to an earlier job")
            reply = Reply(said["status"], str(said["detail"]), ended=bool(said["last"]))
        except TimeoutError:
            reply = Reply("killed", "", ended=True)
        except (EOFError, OSError):
            channel.close()
            status = self.process.exit_status(within_s=5.0)
            by_limit, by_others = status == -signal.SIGVTALRM, -status in OUTSIDE_SIGNALS
            detail = f"worker ended with {exit_name(status)}"
            reply = Reply("killed" if by_limit else "crashed", detail, ended=True, again=by_others)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reply = Reply("crashed", f"worker sent what is no reply to this job: {error!r}", ended=True, again=True)
        if reply.ended:
            self.process.close()
        return reply


class WorkerThreads:
    """The threads of a pool; each has its own worker, and all take their jobs from the same ``TaskQueue``.

    Where there are several callers, there is one worker more than the settings say. It takes only pairs that are not
    known to be costly, so that these do not wait until a worker is done with a costly one.
    """

    def __init__(self, settings: SandboxSettings, *, several_callers: bool = False) -> None:
        self.settings = settings
        self.kills = 0
        slots = range(settings.workers + several_callers)
        self.workers: list[Worker | None] = [None for _ in slots]
        self._queue = TaskQueue()
        self._started: list[Future[None]] = [Future() for _ in slots]
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), daemon=True, name=f"grpo_pl-sandbox-{slot}")
            for slot in slots
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_ready(self) -> None:
        """Waits until all workers have started; raises what prevented one, such as ``WorkerStartError``."""
        for started in self._started:
            started.result()

    def submit(self, job: Job, deadline: float = math.inf, caller: Caller | None = None) -> Future[Verdict]:
        """Adds a job to the queue; the future gets its verdict soon after ``deadline`` (monotonic) at the latest."""
        task = Task(job, deadline, caller)
        if caller is not None:
            task.slow = looks_costly(job[0]) or looks_costly(job[1])
            with caller.lock:
                if caller.gone:
                    task.verdict.cancel()
                else:
                    caller.tasks.add(task)
        self._queue.put(task)
        return task.verdict

    def dismiss(self) -> None:
        """Makes the workers end once all submitted jobs are done; does not wait for that."""
        self._queue.close()

    def close(self) -> None:
        """Ends the workers once all submitted jobs are done, and waits for their threads."""
        self.dismiss()
        for thread in self._threads:
            thread.join(timeout=self.settings.hard_limit_s * self.settings.wall_factor + 5.0)

    def _serve(self, slot: int) -> None:
        try:
            self.workers[slot] = Worker(self.settings)
            self._started[slot].set_result(None)
        except Exception as error:  # passed on to the thread that waits for the start
            self._started[slot].set_exception(error)
        # the first thread begins with costly pairs, so that these get their turn however many others there are
        turn = {"slow_first": slot == 0, "quick_only": slot >= self.settings.workers}
        while (task := self._queue.take(**turn)) is not None:
            try:
                verdict = self._answer(slot, task)
                if verdict.status in ("timeout", "killed") and task.caller is not None and not task.slow:
                    task.slow = True
                    if time.monotonic() < task.deadline:
                        self._queue.put(task)
                        continue
                with suppress(InvalidStateError):  # its caller has gone
                    task.verdict.set_result(verdict)
            except BaseException as error:  # passed on to the caller, who waits for this verdict
                with suppress(InvalidStateError):
                    task.verdict.set_exception(error)
            if task.caller is not None:
                with task.caller.lock:
                    task.caller.tasks.discard(task)
        if (worker := self.workers[slot]) is not None:
            worker.process.close()
            self.workers[slot] = None

    def _answer(self, slot: int, task: Task) -> Verdict:
        """The verdict on one job, from a new worker if the last one has ended; a job whose worker was ended from
        outside, or sent something else, is tried again, ``MAX_ATTEMPTS`` times in all."""
        soft, hard = self.settings.soft_limit_s, self.settings.hard_limit_s
        if task.caller is not None and not task.slow:
            soft, hard = min(soft, SHORT_S), min(hard, SHORT_HARD_S)
        for _ in range(MAX_ATTEMPTS):
            if time.monotonic() >= task.deadline:
                return Verdict("timeout", "no worker was free in time")
            try:
                worker = self.workers[slot] = self.workers[slot] or Worker(self.settings)
            except (WorkerStartError, OSError) as error:
                return Verdict("unavailable", str(error))
            left = max(0.0, task.deadline - time.monotonic())
            reply = self._ask(worker, task, [*task.job, soft, hard], min(hard * self.settings.wall_factor, left))
            if reply.ended:
                self.workers[slot] = None
            if reply.ended and reply.status == "killed":
                self.kills += 1
                return Verdict("killed", f"over {hard:g} s" if math.isinf(task.deadline) else "not done in time")
            if not reply.again or task.verdict.cancelled():
                break
        return Verdict(reply.status, reply.detail)

    def _ask(self, worker: Worker, task: Task, message: list[Any], limit_s: float) -> Reply:
        """The worker's reply; meanwhile the task's caller may kill the worker."""
        if task.caller is None:
            return worker.ask(message, limit_s)
        with task.caller.lock:
            if task.caller.gone:
                return Reply("unavailable", "nobody waits for it any more")
            task.kill = worker.process.kill
        try:
            return worker.ask(message, limit_s)
        finally:
            with task.caller.lock:
                task.kill = None
