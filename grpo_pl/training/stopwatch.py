"""Time of the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def stopwatch(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the wall time of the block to ``seconds[stage]``; waits for the GPU so that its work is counted."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
