"""The place of this process among those of a run, before they have found each other."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """True if this process is rank 0 by the launcher's variables (torchrun, SLURM, Lightning); true without one."""
    names = ("RANK",) if "RANK" in os.environ else ("SLURM_PROCID", "NODE_RANK", "LOCAL_RANK")
    return all(int(os.environ.get(name, "0")) == 0 for name in names)
