"""Limits hold in the process that sets them and never exceed what is allowed there."""

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from grpo_pl.processes.resource_limits import OVER_MEMORY


def _after(statements: str) -> Any:
    """What another process prints as JSON after these statements."""
    code = f"import json, resource\nfrom grpo_pl.processes.resource_limits import *\n{statements}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_limit_can_be_raised_again_unless_it_is_for_good() -> None:
    kind = "resource.RLIMIT_NOFILE"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert _after(f"set_limit({kind}, 50); print(json.dumps(resource.getrlimit({kind})))") == [50, hard]
    assert _after(f"set_limit({kind}, 50, for_good=True); print(json.dumps(resource.getrlimit({kind})))") == [50, 50]


def test_a_limit_does_not_exceed_the_hard_one() -> None:
    kind = "resource.RLIMIT_NOFILE"
    steps = (
        f"set_limit({kind}, 60, for_good=True); set_limit({kind}, 100); print(json.dumps(resource.getrlimit({kind})))"
    )
    assert _after(steps) == [60, 60]


def test_memory_is_that_of_this_process_now() -> None:
    """Of one that does nothing else: this one may give memory back at any time."""
    steps = (
        "before = resident_bytes(); ballast = bytearray(b'1') * (64 * 2**20); after = resident_bytes(); "
        "print(json.dumps([before, after, address_space_bytes()]))"
    )
    before, after, reserved = _after(steps)
    assert 0 < before < after <= reserved
    assert 60 * 2**20 < after - before < 70 * 2**20


@pytest.mark.parametrize(
    ("system", "ballast_mib", "status"),
    [
        pytest.param(sys.platform, 90, 1, marks=pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")),
        ("darwin", 10, 0),
        ("darwin", 90, OVER_MEMORY),
    ],
)
def test_memory_is_bounded_by_the_system_or_by_a_watch(system: str, ballast_mib: int, status: int) -> None:
    code = (
        "import sys, time\nfrom grpo_pl.processes.resource_limits import limit_memory\n"
        f"sys.platform = {system!r}\n"
        "limit_memory(64 * 2**20, beyond_now=True)\n"
        f"ballast = b'1' * ({ballast_mib} * 2**20); time.sleep(0.5)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert ("MemoryError" in done.stderr) == (status == 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
def test_the_kernel_kills_a_process_with_the_one_that_forked_it() -> None:
    code = (
        "import os, time\nfrom grpo_pl.processes.resource_limits import kill_with_parent\n"
        "reading, writing = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    kill_with_parent(); os.write(writing, b'1'); time.sleep(600)\n"
        "os.read(reading, 1); print('forked', flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "forked\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # its end comes when the child, which has it open as well, has ended
    parent.stdout.close()
