"""The number of workers that a sandboxed reward starts by default."""

import os
import subprocess
import sys

import pytest

_PRINT_WORKERS = "from grpo_pl.rewards import MathReward; print(MathReward().workers)"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here")
def test_there_are_two_workers_but_one_where_a_single_core_may_be_used() -> None:
    cores = sorted(os.sched_getaffinity(0))
    for bound in (cores, cores[:1]):
        code = f"import os; os.sched_setaffinity(0, {bound}); {_PRINT_WORKERS}"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(found.stdout) == min(2, len(bound))
