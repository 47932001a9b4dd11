"""A pool of killable worker processes that judge untrusted answers under real limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grpo_pl.rewards.base import Status

WORKER_FILE = Path(__file__).with_name("math_worker.py")
START_LIMIT_S = 60.0
"""A worker that has not reported by then will not: importing SymPy takes half a second, more on a busy machine."""
OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
"""Signals that a worker does not send itself: somebody outside ended it."""
LASTING = frozenset({"ok", "wrong", "bad_gold", "crashed"})
"""Verdicts that depend on the pair alone; a time-out may be due to a busy machine and is not remembered."""

Job = tuple[str, str]


class Verdict(NamedTuple):
    """What a worker found out about one (gold, answer) pair."""

    status: Status
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Limits of one worker pool."""

    workers: int = 2
    """Worker processes."""
    soft_limit_s: float = 1.0
    """Seconds after which a comparison is interrupted (status ``timeout``)."""
    hard_limit_s: float = 2.5
    """Seconds after which a worker that ignores the interruption is killed (status ``killed``)."""
    memory_limit_mb: int = 2048
    """Address space of one worker (``RLIMIT_AS``)."""
    relative_tolerance: float = 1e-4
    """How far apart two equal numbers may be, relative to the gold one."""
    cache_size: int = 65_536
    """Verdicts remembered across batches."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}.")
        if not (math.isfinite(self.soft_limit_s) and self.soft_limit_s > 0):
            raise ValueError(f"soft_limit_s must be a positive number of seconds, got {self.soft_limit_s}.")
        if not (math.isfinite(self.hard_limit_s) and self.hard_limit_s > self.soft_limit_s):
            raise ValueError(
                f"hard_limit_s must be finite and above soft_limit_s={self.soft_limit_s}, got {self.hard_limit_s}."
            )
        if self.memory_limit_mb < 512:
            raise ValueError(f"memory_limit_mb must be at least 512 (SymPy needs it), got {self.memory_limit_mb}.")
        if self.cache_size < 0:
            raise ValueError(f"cache_size must be 0 (off) or more, got {self.cache_size}.")


class WorkerStartError(RuntimeError):
    """A worker could not be started: a broken installation or a machine out of resources."""


class _Died(Exception):
    """The worker ended while it had a job."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


class _OverHardLimit(Exception):
    """The worker did not answer in time."""


class _Worker:
    """One child process and its pipes; used by one thread."""

    def __init__(self, settings: SandboxSettings) -> None:
        # -P keeps the folder of the worker file off sys.path, where a module could shadow one that SymPy imports.
        # Unbuffered pipes: a forked copy of this object must not flush half a message when it is dropped.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # SymPy's order of terms, hence its verdicts, follow hashes
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        try:
            hello = self._exchange(asdict(settings), START_LIMIT_S)
        except _OverHardLimit:
            self.kill()
            raise WorkerStartError(f"the sandbox worker did not start within {START_LIMIT_S:g} s.") from None
        except _Died as error:
            raise WorkerStartError(f"the sandbox worker ended at start with code {error.returncode}.") from None
        if not hello["ready"]:
            self.kill()
            raise WorkerStartError(f"the sandbox worker could not import math-verify: {hello['error']}")

    def ask(self, job: Job, limit_s: float) -> dict[str, Any]:
        return self._exchange(job, limit_s)

    def _exchange(self, message: Any, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        body = json.dumps(message).encode("ascii")
        try:
            self._write(struct.pack(">I", len(body)) + body)
            (size,) = struct.unpack(">I", self._read(4, deadline))
            reply: dict[str, Any] = json.loads(self._read(size, deadline))
        except (BrokenPipeError, EOFError):
            raise _Died(self._reap()) from None
        return reply

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._in, data) :]

    def _read(self, count: int, deadline: float) -> bytes:
        poll = select.poll()  # select() fails on descriptors from 1024 on
        poll.register(self._out, select.POLLIN)
        parts = []
        while count:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _OverHardLimit
            part = os.read(self._out, count)
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _reap(self) -> int:
        self.drop_pipes()
        try:
            return self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # closed its pipe and lives on: not a worker any more
            self.process.kill()
            return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> None:
        """Ends an idle worker: the closed pipe tells it to leave."""
        self._reap()

    def drop_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Crew:
    """The threads of a pool, each with its own worker, fed from one queue."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self.workers: list[_Worker | None] = [None] * settings.workers
        self._tasks: queue.SimpleQueue[tuple[Job, Future[Verdict]] | None] = queue.SimpleQueue()
        self._started: list[Future[None]] = [Future() for _ in range(settings.workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), daemon=True, name=f"grpo_pl-sandbox-{i}")
            for i in range(settings.workers)
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_ready(self) -> None:
        for started in self._started:
            started.result()

    def submit(self, job: Job) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        self._tasks.put((job, future))
        return future

    def dismiss(self) -> None:
        """Ends the workers once the jobs already handed in are done, without waiting for that."""
        for _ in self._threads:
            self._tasks.put(None)

    def close(self) -> None:
        self.dismiss()
        for thread in self._threads:
            thread.join(timeout=self.settings.hard_limit_s + 5.0)

    def _serve(self, slot: int) -> None:
        try:
            self.workers[slot] = _Worker(self.settings)
            self._started[slot].set_result(None)
        except Exception as error:  # whatever it is, the thread that waits for the start must see it
            self._started[slot].set_exception(error)
        while (task := self._tasks.get()) is not None:
            job, future = task
            try:
                future.set_result(self._answer(slot, job))
            except BaseException as error:  # the caller waits for this future: it must learn of a fault in here
                future.set_exception(error)
        worker = self.workers[slot]
        if worker is not None:
            worker.stop()
            self.workers[slot] = None

    def _answer(self, slot: int, job: Job) -> Verdict:
        """The verdict on one job, in a new worker if the old one is gone; a job lost to an outsider is tried again."""
        for attempt in range(2):
            worker = self.workers[slot]
            try:
                if worker is None:
                    self.counts["restarts"] += 1
                    worker = self.workers[slot] = _Worker(self.settings)
                reply = worker.ask(job, self.settings.hard_limit_s)
            except (WorkerStartError, OSError) as error:
                return Verdict("unavailable", str(error))
            except _OverHardLimit:
                self.counts["kills"] += 1
                self.workers[slot] = None
                assert worker is not None
                worker.kill()
                return Verdict("killed", f"over {self.settings.hard_limit_s:g} s")
            except _Died as death:
                self.workers[slot] = None
                if death.returncode == -signal.SIGVTALRM:
                    return Verdict("killed", f"over {self.settings.hard_limit_s:g} s")
                if attempt == 0 and -death.returncode in OUTSIDE_SIGNALS:
                    continue
                return Verdict("crashed", f"worker ended with {_name_of(death.returncode)}")
            if reply["last"]:
                self.workers[slot] = None
                worker.stop()
            return Verdict(reply["status"], reply["detail"])
        raise AssertionError("unreachable: the second attempt always returns")


def _name_of(returncode: int) -> str:
    return signal.Signals(-returncode).name if returncode < 0 else f"code {returncode}"


class WorkerPool:
    """Judges (gold, answer) pairs in killable processes; safe from any thread, and anew in each forked child.

    Workers start on first use or with :meth:`start`, end when their parent ends, however it ends, and never import
    torch, so they may be started under CUDA, in daemonic processes and in data loader workers.
    """

    _lock: threading.Lock
    _crew: _Crew | None
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
            crew = self._ensure_crew()
        crew.wait_until_ready()

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict per job, in order; equal jobs are judged once."""
        if not jobs:
            return []
        self.start()
        waiting: dict[Job, Future[Verdict]] = {}
        verdicts: dict[Job, Verdict] = {}
        with self._lock:  # close() must not come between finding the crew and handing it a job
            for job in dict.fromkeys(jobs):
                if job in self._cache:
                    self._cache.move_to_end(job)
                    verdicts[job] = self._cache[job]
                else:
                    waiting[job] = self._ensure_crew().submit(job)
        for job, future in waiting.items():
            verdicts[job] = future.result()
        with self._lock:
            self._cache.update((job, verdicts[job]) for job in waiting if verdicts[job].status in LASTING)
            while len(self._cache) > self.settings.cache_size:
                self._cache.popitem(last=False)
        return [verdicts[job] for job in jobs]

    @property
    def kills(self) -> int:
        """Workers killed for ignoring the soft limit."""
        return self._crew.counts["kills"] if self._crew is not None else 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [w.process.pid for w in self._crew.workers if w is not None] if self._crew is not None else []

    def close(self) -> None:
        """Ends the workers; the pool starts new ones if it is used again."""
        with self._lock:
            crew, self._crew = self._crew, None
        if crew is not None:
            self._finalizer.detach()
            crew.close()

    def _ensure_crew(self) -> _Crew:
        """The crew, made if there is none; called with the lock held."""
        if self._crew is None:
            self._crew = _Crew(self.settings)
            self._finalizer = weakref.finalize(self, self._crew.dismiss)
            self._finalizer.atexit = False
        return self._crew

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._crew = None
        self._cache = OrderedDict()

    def _after_fork(self) -> None:
        """Leaves the parent's workers to the parent: this process has copies of their pipes, and no threads."""
        crew = self._crew
        self._forget()
        if crew is not None:
            self._finalizer.detach()
            for worker in crew.workers:
                if worker is not None:
                    worker.drop_pipes()

    def __getstate__(self) -> SandboxSettings:
        return self.settings

    def __setstate__(self, settings: SandboxSettings) -> None:
        self.__init__(settings)  # type: ignore[misc]


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)
