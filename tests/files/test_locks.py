"""One process at a time works on a run."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.files.locks import FolderLock


@contextmanager
def _holder(folder: Path, *, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that has taken the lock; killed at the end."""
    code = f"""
import sys, time
from pathlib import Path
from grpo_pl.files.locks import FolderLock
lock = FolderLock(Path({str(folder)!r}))
lock.take()
{then}
print("taken", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    with _holder(tmp_path) as process:
        expected = rf"in use by process {process.pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d "
        with pytest.raises(ValueError, match=expected):
            FolderLock(tmp_path).take()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_whatever_ends_its_holder_frees_it(tmp_path: Path, end: signal.Signals) -> None:
    with _holder(tmp_path) as process:
        process.send_signal(end)
        process.wait()
    lock = FolderLock(tmp_path)
    assert lock.take() == ""
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_processes_that_outlive_the_holder_do_not_keep_it(tmp_path: Path) -> None:
    workers = f"""
import os, subprocess
started = subprocess.Popen(["sleep", "600"], close_fds=False)
forked = os.fork()
if forked == 0:
    time.sleep(600)
    os._exit(0)
print(started.pid, forked, file=open(Path("{tmp_path}") / "workers", "w"))
"""
    with _holder(tmp_path, then=workers):
        pids = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    try:
        for pid in pids:
            os.kill(pid, 0)  # they live
        lock = FolderLock(tmp_path)
        deadline = time.monotonic() + 120
        while True:
            try:
                assert lock.take() == ""
                break
            except ValueError:  # the forked one has not had its turn yet
                assert time.monotonic() < deadline
                time.sleep(0.05)
        lock.release()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_one_that_was_let_go_is_free_for_the_next_of_the_same_process(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    with pytest.raises(ValueError, match=f"process {os.getpid()} on"):
        second.take()
    first.release()
    second.take()
    second.release()


def test_a_file_system_without_locks_is_said_and_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    assert FolderLock(tmp_path).take() == "No locks available"
    assert list(tmp_path.iterdir()) == []


def test_a_run_holds_its_lock_while_it_trains_and_is_not_gone_on_with_twice(command_line: Any) -> None:
    callback = {"class_path": "user_parts.Meddling"}
    config = command_line.config("busy", data__steps=1, trainer={"accelerator": "cpu", "callbacks": [callback]})
    run = command_line.runs / "busy"
    assert f"{run} is in use by process {os.getpid()}" in command_line.done("fit", "--config", config).err
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with _holder(run) as process:
        outcome = command_line("fit", "--config", config, "--resume", "--data.steps=2")
        assert outcome.status == 1
        last = outcome.err.splitlines()[-1]
        assert last.startswith(f"grpo-pl fit: error: {run} is in use by process {process.pid} on ")
        (run / ".lock").unlink()  # its own
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} | {run: 0} == before | {run: 0}
    assert command_line("fit", "--config", config, "--resume", "--data.steps=2").status == 0
    assert not (run / ".lock").exists()


def test_who_comes_to_a_block_later_waits_until_it_is_through(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from grpo_pl.files.cache import one_at_a_time
log = Path({str(tmp_path / "log")!r})
with one_at_a_time(Path({str(tmp_path / "lock")!r})):
    log.write_text(log.read_text() + "in " if log.exists() else "in ")
    import time; time.sleep(0.05)
    log.write_text(log.read_text() + "out ")
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "in out " * 3
