"""Limits that a process sets on itself, and its end with its parent."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

OVER_MEMORY = 71
"""Exit status of a process whose memory went over its limit, where the system does not keep one."""

_PARENT_CHECK_S = 0.5
_MEMORY_CHECK_S = 0.05
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36

_watch: threading.Thread | None = None
_watch_ends = threading.Event()


def set_limit(kind: int, most: int, *, for_good: bool = False) -> None:
    """Sets a limit of this process, or the hard limit that is in force where that is lower.

    Args:
        kind: one of ``resource.RLIMIT_*``.
        for_good: lowers the hard limit as well, so that the process cannot raise it again.
    """
    hard = resource.getrlimit(kind)[1]
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed if for_good else hard))


def limit_memory(most: int, *, beyond_now: bool = False) -> None:
    """Bounds the memory of this process to so many bytes.

    Linux bounds the address space: an allocation beyond it fails. macOS refuses such a limit, so that there a thread
    looks at the resident memory and ends the process with status `OVER_MEMORY` once it is higher. The thread cannot
    look while one call into C holds Python's lock: limits on CPU time end those.

    Args:
        beyond_now: what the process has already comes on top.
    """
    if sys.platform == "linux":
        set_limit(resource.RLIMIT_AS, most + (address_space_bytes() if beyond_now else 0))
        return
    most += resident_bytes() if beyond_now else 0

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that computes
        while resident_bytes() <= most:
            time.sleep(_MEMORY_CHECK_S)
        os._exit(OVER_MEMORY)

    threading.Thread(target=watch, daemon=True, name="memory-watch").start()


def address_space_bytes() -> int:
    """Address space of this process; 0 where the system does not say."""
    return _memory_pages(0) * resource.getpagesize()


def resident_bytes() -> int:
    """Resident memory of this process. Not ``ru_maxrss`` on Linux, which starts at the peak of the parent process, and
    that may be a training process of many GiB."""
    return _memory_pages(1) * resource.getpagesize() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _memory_pages(column: int) -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[column])
    except OSError:  # not Linux; on macOS ru_maxrss is in bytes and belongs to this program alone
        return 0


def kill_with_parent() -> None:
    """Lets the kernel kill this process when the thread that forked it ends; on Linux only. For processes without
    threads: others call `end_with_parent`.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def child_pids() -> set[int]:
    """The processes whose parent this one is; none where the system does not say."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:  # not Linux
        return set()


def forbid_inspection() -> None:
    """Lets no process of this user but root's read the memory, variables or descriptors of this one; on Linux only.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind when they end; on Linux only.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl: {os.strerror(error)}")


def end_with_parent(parent: int) -> None:
    """Starts a thread that ends this process once the process ``parent`` is not its parent any more, and with it those
    that it has started if it leads a group of its own.

    The kernel's notice would come when the *thread* that started the process ends, and the other end of a socket may be
    held open by other children of the parent.
    """

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that computes
        while not _watch_ends.wait(_PARENT_CHECK_S):
            if os.getppid() != parent:
                if os.getpgrp() == os.getpid():
                    os.killpg(0, signal.SIGKILL)
                os._exit(1)

    global _watch
    _watch_ends.clear()
    _watch = threading.Thread(target=watch, daemon=True, name="parent-watch")
    _watch.start()


def stop_watching_parent() -> None:
    """Ends the thread of `end_with_parent`, for a process that forks others."""
    _watch_ends.set()
    if _watch is not None:
        _watch.join()
