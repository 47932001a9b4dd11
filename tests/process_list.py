"""The processes that a test has started and not ended."""

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
