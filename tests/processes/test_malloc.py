"""What glibc's malloc does with freed memory, in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

REPEAT = """
import resource
from grpo_pl.processes.malloc import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        [b"1" * 8_000_000 for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(pages())
keep_freed_memory()
pages()
print(pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    """Of the system, where malloc asks it for pieces of a MB and more, for each of five times 4 texts."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run([sys.executable, "-c", REPEAT], capture_output=True, text=True, check=True, env=environment)
    before, after = map(int, done.stdout.split())
    assert before >= 100 and after < before / 10  # 39,060 pages of 4 KiB
