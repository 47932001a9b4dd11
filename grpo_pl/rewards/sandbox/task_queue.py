"""The queue of pairs to judge: callers take turns, quick pairs come first, those of callers that left are dropped."""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_pl.rewards.base import Status

Job = tuple[str, str]

_GROWING = re.compile(r"\^|!|\\[dt]?binom")
_LONG_LOOP = re.compile(r"\\(?:prod|sum|i{0,3}int|lim)(?![a-z])")
_TOWER = re.compile(r"(?:\^|!|binom)[^+\-=,]*?(?:\^|!|binom)")
_LARGE = re.compile(r"\d{3}")
_READ = 1000  # characters that `looks_costly` reads


class Verdict(NamedTuple):
    """A worker's verdict on one (gold, answer) pair."""

    status: Status
    detail: str = ""


class Caller:
    """One of several who share a pool, such as a request to a server; see ``CALLER``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tasks: set[Task] = set()
        self.gone = False

    def leave(self) -> None:
        """Drops the pairs that wait, and kills the workers of those that are being judged. Whoever waits for a verdict
        gets a ``CancelledError``; may be called from any thread."""
        with self.lock:
            self.gone = True
            for task in self.tasks:
                task.verdict.cancel()
                if task.kill is not None:
                    task.kill()
            self.tasks.clear()


CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)
"""On whose behalf this context uses pools. Pairs of different callers take turns, and each pair first gets a short time
only, so that the costly pairs of one do not hold up the others. None: all workers are for this use alone."""


@dataclass(eq=False)
class Task:
    """A pair to judge."""

    job: Job
    deadline: float = math.inf
    """Time of ``time.monotonic`` at which the verdict is due."""
    caller: Caller | None = None
    slow: bool = False
    """It has taken more than the short time, or looks as if it will."""
    verdict: Future[Verdict] = field(default_factory=Future)
    kill: Callable[[], None] | None = None
    """Kills the worker that judges it now; changed under the caller's lock."""


def growth(text: str) -> int:
    """Number of symbols in a formula that make numbers grow fast."""
    return len(_GROWING.findall(text))


def looks_costly(text: str) -> bool:
    """True if a formula may take seconds: a long loop, a tower of powers and factorials, or one of a large number. Only
    the order of work depends on it."""
    text = text[:_READ]
    if _LONG_LOOP.search(text) or _TOWER.search(text):
        return True
    return bool(_GROWING.search(text) and _LARGE.search(text))


class TaskQueue:
    """The pairs that wait for a worker; may be used from any thread."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._closed = False
        self._quick: OrderedDict[Caller | None, deque[Task]] = OrderedDict()  # by whose turn it is
        self._slow: OrderedDict[Caller | None, deque[Task]] = OrderedDict()

    def put(self, task: Task) -> None:
        with self._news:
            level = self._slow if task.slow else self._quick
            level.setdefault(task.caller, deque()).append(task)
            self._news.notify_all()

    def take(self, *, slow_first: bool, quick_only: bool) -> Task | None:
        """Waits for a task; None when there are none and there will be no more. Once closed, ``quick_only`` has no
        effect: nobody else may be left for a pair that turns out to be slow."""
        levels = [self._slow, self._quick] if slow_first else [self._quick, self._slow]
        with self._news:
            while True:
                for level in [self._quick] if quick_only and not self._closed else levels:
                    while level:
                        caller, tasks = level.popitem(last=False)
                        task = tasks.popleft()
                        if tasks:
                            level[caller] = tasks  # behind all others
                        if not task.verdict.cancelled():
                            return task
                if self._closed:
                    return None
                self._news.wait()

    def close(self) -> None:
        """Lets `take` return None once all tasks are taken."""
        with self._news:
            self._closed = True
            self._news.notify_all()
