"""Ends a process soon after its launcher has ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the launcher."""
ORPHANED = 143
"""Exit status, as after SIGTERM."""
WATCH = "grpo_pl-launcher"
"""Name of the watching thread."""


def end_with_launcher() -> None:
    """Starts a thread that ends this process once its launcher has ended. Further calls do nothing.

    Applies to processes started by torchrun, or by Lightning in its first process. Otherwise nothing is started: a
    process that a person started may outlive the shell.

    The thread polls, because Linux's own signal (``PR_SET_PDEATHSIG``) is sent when the *thread* that started the
    process ends, and never if that ended before the signal was requested.
    """
    if not _was_launched() or any(thread.name == WATCH for thread in threading.enumerate()):
        return
    launcher = _launcher()
    if launcher is None:  # it ended while this process started
        _end()
    threading.Thread(target=_watch, args=(launcher,), daemon=True, name=WATCH).start()


def _was_launched() -> bool:
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    by_lightning = "RANK" not in os.environ and {"LOCAL_RANK", "NODE_RANK", "MASTER_PORT"} <= os.environ.keys()
    return by_torchrun or (by_lightning and os.environ["LOCAL_RANK"] != "0")


def _launcher() -> int | None:
    """Process id of the nearest ancestor that is a Python process, as a shell script may stand between; on a system
    without ``/proc`` the parent, unless that is process 1. None once it has ended."""
    pid = os.getppid()
    if not Path("/proc/self/stat").exists():
        return pid if pid != 1 else None
    with suppress(OSError):  # an ancestor may end meanwhile
        while pid > 0:
            with suppress(PermissionError):  # it may belong to another user
                if "python" in Path(os.readlink(f"/proc/{pid}/exe")).name:
                    return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _watch(launcher: int) -> None:
    missed = 0
    while missed < 2:  # one miss may be a shell script in between that has just ended
        time.sleep(LOOK_EVERY_S)
        missed = 0 if _launcher() == launcher else missed + 1
    _end()


def _end() -> NoReturn:
    """Ends the process without cleaning up, because other threads may wait for processes that have ended. Workers end
    by themselves when their pipes close."""
    with suppress(OSError, ValueError):  # the terminal may have closed with the launcher
        print("grpo-pl: the launcher has ended, and so does this process; --resume goes on.", file=sys.stderr)
        sys.stderr.flush()
    os._exit(ORPHANED)
