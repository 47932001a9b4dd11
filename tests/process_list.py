"""The processes that a test has started, and whether one has ended."""

import time
from pathlib import Path

import psutil


def started_processes() -> dict[int, list[str]]:
    """Number -> command line of every process below this one, but for browsers: other tests of this process leave one
    open, and it starts helpers whenever it likes."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if not child.name().startswith("chrom"):
                found[child.pid] = child.cmdline()
        except psutil.NoSuchProcess:
            continue  # ended meanwhile
    return found


def lives(pid: int) -> bool:
    """False also for a process that has ended and that nobody has waited for. Its first thread may have ended before
    others, which hold its files open until they are gone too."""
    try:
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False


def gone(pid: int, seconds: float = 60.0) -> bool:
    """True once the process has ended, which it gets ``seconds`` for."""
    deadline = time.monotonic() + seconds
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(pid)
