"""A pool of worker processes that judge untrusted answers within limits and can be killed; rewards that judge in it."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.sandbox.task_queue import CALLER, Job, Verdict, growth
from grpo_pl.rewards.sandbox.worker_threads import SandboxSettings, WorkerStartError, WorkerThreads

__all__ = ["Job", "SandboxSettings", "Verdict", "WorkerPool", "WorkerStartError"]

CACHEABLE = frozenset({"ok", "wrong", "bad_gold", "crashed"})
"""Statuses that depend on the pair alone; a time-out may be due to a busy machine and is not cached."""


class WorkerPool:
    """Judges (gold, answer) pairs in worker processes; may be used from any thread.

    Workers start on first use or with `start`, and end when their parent ends, in whatever way. They never import
    torch, so they may be started under CUDA, in daemonic processes and in data loader workers. A forked child does not
    use its parent's workers but starts its own.
    """

    _threads: WorkerThreads | None
    _cache: OrderedDict[Job, Verdict]
    _finalizer: weakref.finalize[Any, WorkerPool]

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._forget()
        _pools.add(self)

    def start(self) -> None:
        """Starts the workers and waits for them.

        Raises:
            WorkerStartError: math-verify cannot be imported, or the machine refuses another process.
        """
        with self._lock:
            threads = self._ensure_threads()
        threads.wait_until_ready()

    def run(self, jobs: Sequence[Job], *, within_s: float = math.inf) -> list[Verdict]:
        """One verdict per (gold, answer) pair, in order; equal pairs are judged once, cached ones not again.

        Args:
            within_s: seconds of the clock after which pairs that still wait or run get ``timeout`` or ``killed``.

        Raises:
            WorkerStartError: see `start`.
            CancelledError: the caller (see ``CALLER``) has left.
        """
        if not jobs:
            return []
        self.start()
        deadline, caller = time.monotonic() + within_s, CALLER.get()
        waiting: dict[Job, Future[Verdict]] = {}
        verdicts: dict[Job, Verdict] = {}
        with self._lock:  # close() must not run between finding the threads and submitting a job to them
            # Jobs that may take long go first, so that none begins when the other workers have run out of jobs.
            for job in sorted(dict.fromkeys(jobs), key=lambda job: growth(job[1]), reverse=True):
                if job in self._cache:
                    self._cache.move_to_end(job)
                    verdicts[job] = self._cache[job]
                else:
                    waiting[job] = self._ensure_threads().submit(job, deadline, caller)
        for job, future in waiting.items():
            verdicts[job] = future.result()
        with self._lock:
            self._cache.update((job, verdicts[job]) for job in waiting if verdicts[job].status in CACHEABLE)
            while len(self._cache) > self.settings.cache_size:
                self._cache.popitem(last=False)
        return [verdicts[job] for job in jobs]

    @property
    def kills(self) -> int:
        """Number of workers killed at the hard limit since the workers were started."""
        return self._threads.kills if self._threads is not None else 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [w.process.pid for w in self._threads.workers if w is not None] if self._threads is not None else []

    def close(self) -> None:
        """Ends the workers; the pool starts new ones if it is used again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            self._finalizer.detach()
            threads.close()

    def _ensure_threads(self) -> WorkerThreads:
        """The threads, started if there are none; the caller holds the lock."""
        if self._threads is None:
            self._threads = WorkerThreads(self.settings, several_callers=CALLER.get() is not None)
            self._finalizer = weakref.finalize(self, self._threads.dismiss)
            self._finalizer.atexit = False
        return self._threads

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._threads = None
        self._cache = OrderedDict()

    def _after_fork(self) -> None:
        """In a forked child: closes its copies of the channels to the parent's workers and starts without threads."""
        threads = self._threads
        self._forget()
        if threads is not None:
            self._finalizer.detach()
            for worker in threads.workers:
                if worker is not None:
                    worker.process.close()

    def __getstate__(self) -> SandboxSettings:
        return self.settings

    def __setstate__(self, settings: SandboxSettings) -> None:
        self.__init__(settings)  # type: ignore[misc]


def shared_pool(settings: SandboxSettings) -> WorkerPool:
    """The one pool of this process with these settings, created if there is none."""
    with _shared_lock:
        if (pool := _shared.get(settings)) is None:
            pool = _shared[settings] = WorkerPool(settings)
        return pool


# One registry per process: a fork concerns every pool, and rewards with equal limits share one wherever they are built.
# Weak, so that the workers of a pool end once no reward refers to it.
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[SandboxSettings, WorkerPool] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def _forget_after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for pool in list(_pools):
        pool._after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)


def _default_workers() -> int:
    """Two, or one where this process may use a single core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2, cores)


@dataclass(kw_only=True)
class SandboxedReward(Reward):
    """A reward whose judge runs in a pool of worker processes, under limits on CPU time and memory."""

    judge: ClassVar[str] = SandboxSettings.judge
    """Module that defines ``judge``."""
    workers: int = field(default_factory=_default_workers)
    """Worker processes, by default two, or one where a single core may be used; rewards with the same limits share
    them."""
    soft_limit_s: float = 1.0
    """CPU seconds after which a comparison is interrupted (status ``timeout``)."""
    hard_limit_s: float = 1.5
    """CPU seconds after which a worker that cannot be interrupted is killed (status ``killed``)."""
    memory_limit_mb: int = 2048
    """Address space of one worker in MiB."""
    max_answer_chars: int = 1000
    """Longer boxed answers are not judged (status ``too_long``)."""
    pool: WorkerPool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_at_least(1, f"reward {self.name!r}", max_answer_chars=self.max_answer_chars)
        names = [f.name for f in fields(SandboxSettings) if hasattr(self, f.name)]
        self.pool = shared_pool(SandboxSettings(**{name: getattr(self, name) for name in names}))

    def start(self) -> None:
        self.pool.start()

    def close(self) -> None:
        """Ends the workers, also for other rewards that share them; the next use of one starts new workers."""
        self.pool.close()
