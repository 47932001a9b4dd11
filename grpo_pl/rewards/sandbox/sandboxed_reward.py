"""``SandboxedReward``: the base class of rewards whose judge runs in the sandbox."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import ClassVar

from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.sandbox.pool import SandboxSettings, WorkerPool, shared_pool


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
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars must be at least 1, got {self.max_answer_chars}.")
        names = [f.name for f in fields(SandboxSettings) if hasattr(self, f.name)]
        self.pool = shared_pool(SandboxSettings(**{name: getattr(self, name) for name in names}))

    def start(self) -> None:
        self.pool.start()

    def close(self) -> None:
        """Ends the workers, also for other rewards that share them; the next use of one starts new workers."""
        self.pool.close()
