"""Episodes in threads of this process, for environments whose steps return: one that hangs occupies a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from grpo_pl.environment import Environment, PoolLimits, Transition, attempted
from grpo_pl.extras.agents.limits import over_time


@dataclass
class _Task:
    episode: int
    method: str
    arguments: dict[str, Any]
    began: float | None = None
    """When a thread took it up; None while it waits for one."""
    environment: Environment | None = None
    over: bool = False
    """It is done, or its episode has ended without it."""


class Threads:
    """Runs resets and steps of many episodes at once; used by one thread."""

    def __init__(self, prototype: Environment, limits: PoolLimits) -> None:
        self.prototype, self.limits = prototype, limits
        self.environments: dict[int, Environment] = {}
        self._lock = threading.Lock()  # over what a task has become, and whose its environment is
        self._forget()

    def _forget(self) -> None:
        """Begins anew; threads of before keep their own queues."""
        self._running: dict[int, _Task] = {}
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[_Task, Transition]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self.prototype.prepare()

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks that the environment brings along."""
        return [dict(task) for task in self.prototype.tasks()]

    def submit(self, episode: int, method: str, arguments: dict[str, Any]) -> None:
        task = self._running[episode] = _Task(episode, method, arguments)
        if len(self._threads) < min(self.limits.threads, len(self._running)):
            self._add_thread()
        self._tasks.put(task)

    def poll(self, timeout_s: float) -> list[tuple[int, Transition]]:
        """Transitions that are complete by now, or within ``timeout_s``."""
        ended: list[tuple[int, Transition]] = []
        left = min((self._left(task) for task in self._running.values()), default=0.0)
        wait = max(1e-3, min(timeout_s, left))
        with contextlib.suppress(queue.Empty):
            while True:
                task, transition = self._ended.get(timeout=wait)
                del self._running[task.episode]
                ended.append((task.episode, transition))
                wait = 0.0
        for episode, task in list(self._running.items()):
            if self._left(task) <= 0 and self._abandon(task):
                del self._running[episode]
                self._add_thread()  # in the place of the one that hangs
                ended.append((episode, over_time(self.prototype, task.method, self.limits)))
        return ended

    def discard(self, episode: int) -> None:
        _close(self.environments.pop(episode, None))

    def close(self) -> None:
        """Closes all environments and ends the threads; one that hangs in a step ends with its step."""
        for task in self._running.values():
            self._abandon(task)
        for episode in list(self.environments):
            self.discard(episode)
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._forget()
        self.prototype.shutdown()

    def _left(self, task: _Task) -> float:
        """Seconds until a task is overdue; one that waits for a thread cannot be."""
        return self.limits.of(task.method) - (0.0 if task.began is None else time.monotonic() - task.began)

    def _is_first(self, task: _Task) -> bool:
        """True for one of the two: the thread that has done a task, and who ends its episode without it."""
        with self._lock:
            first, task.over = not task.over, True
            return first

    def _abandon(self, task: _Task) -> bool:
        """Ends an episode without its task; false if that is done. The thread of one that has begun closes what it
        plays."""
        if (first := self._is_first(task)) and task.began is not None:
            self.environments.pop(task.episode, None)
        return first

    def _add_thread(self) -> None:
        name = f"grpo_pl-environment-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, args=(self._tasks, self._ended), daemon=True, name=name)
        self._threads.append(thread)
        thread.start()

    def _serve(
        self, tasks: queue.SimpleQueue[_Task | None], results: queue.SimpleQueue[tuple[_Task, Transition]]
    ) -> None:
        while (task := tasks.get()) is not None:
            with self._lock:
                if task.over:  # its pool was closed while it waited
                    return
                task.environment, task.began = self.environments.get(task.episode), time.monotonic()
            done = attempted(self._call, {"task": task}, where=task.method, blame=self.prototype.blame)
            if not self._is_first(task):
                _close(task.environment)
                return  # another thread has taken this one's place
            results.put((task, done))

    def _call(self, task: _Task) -> Any:
        if task.method == "reset":
            task.environment = self.prototype.fresh()
            with self._lock:
                if not task.over:
                    self.environments[task.episode] = task.environment
        return getattr(task.environment, task.method)(**task.arguments)


def _close(environment: Environment | None) -> None:
    if environment is not None:
        with contextlib.suppress(Exception):  # the episode is over, whatever closing it does
            environment.close()
