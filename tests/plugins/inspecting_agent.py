"""An agent that runs a text which reads the processes of its session and of others; none has root's privileges."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from user_agents import ask, user

INSPECTION = """
import ctypes, os, sys
if sys.platform == "linux":
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
    children = lambda pid: open(f"/proc/{pid}/task/{pid}/children").read().split()
    agent, episode = os.getppid(), int(sys.argv[1])
    episodes = children(open(f"/proc/{episode}/stat").read().rpartition(")")[2].split()[1])
    pids = [*episodes, *(each for one in episodes for each in children(one))]
    assert str(agent) in pids and str(episode) in pids and len(pids) >= 4, pids
    for file in [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem")]:
        try:
            open(file, "rb").close()
        except PermissionError:
            continue
        print(file)
"""
if sys.platform == "linux":  # where the sessions are forked from: nobody may read what has more privileges
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0


def run(task: Any, base_url: str, key: str) -> None:
    answer = ask(base_url, key, [user("first")])
    if task["wait"]:  # to be read
        ask(base_url, key, [user("first"), answer, user("second")])
        return
    told = subprocess.run([sys.executable, "-c", INSPECTION, str(os.getppid())], capture_output=True, text=True)
    assert not told.stdout + told.stderr, told
