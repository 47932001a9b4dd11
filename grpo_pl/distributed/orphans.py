"""A process that a launcher started ends soon after its launcher, which alone could end it or read its output."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LOOK_EVERY_S = 1.0
ORPHANED = 143
"""Exit status, as after SIGTERM."""
WATCH = "grpo_pl-launcher"
"""Name of the thread."""


def end_with_launcher() -> None:
    """Starts the watch if torchrun, or Lightning in its first process, started this process; otherwise does nothing:
    what a person started may outlive the shell. Calling it again changes nothing.

    A thread looks who the launcher is, for a system's own notice (``PR_SET_PDEATHSIG``) comes when the *thread* that
    started the process ends, and not at all where that was before it was asked for.
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
    """The nearest Python process that this one descends from, for a shell script may stand between; where the system
    does not say (no ``/proc``), the parent, if it is not the first process of all. None once it has ended."""
    pid = os.getppid()
    if not Path("/proc/self/stat").exists():
        return pid if pid != 1 else None
    with suppress(OSError):  # one of them ends just now
        while pid > 0:
            with suppress(PermissionError):  # it is another user's
                if "python" in Path(os.readlink(f"/proc/{pid}/exe")).name:
                    return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _watch(launcher: int) -> None:
    missed = 0
    while missed < 2:  # once may be a script that has just ended
        time.sleep(LOOK_EVERY_S)
        missed = 0 if _launcher() == launcher else missed + 1
    _end()


def _end() -> NoReturn:
    """At once: other threads may wait for processes that have ended. Workers end when their pipes close."""
    with suppress(OSError, ValueError):  # the terminal may be gone with the launcher
        print("grpo-pl: the launcher has ended, and so does this process; --resume goes on.", file=sys.stderr)
        sys.stderr.flush()
    os._exit(ORPHANED)
