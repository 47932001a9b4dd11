"""Files of weights are there as long as their push, and what a killed run leaves goes with the next one."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_pl.rollout.remote.pushed_files import PushedFiles

ONE, OTHER = "1" * 32, "2" * 32
KILLED = """
import sys, time
from pathlib import Path
from grpo_pl.rollout.remote.pushed_files import PushedFiles

with PushedFiles(Path(sys.argv[1]), "1" * 32, "0") as files:
    files.write(b"weights")
    print("written", flush=True)
    time.sleep(300)
"""


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_are_there_for_one_push(tmp_path: Path) -> None:
    with PushedFiles(tmp_path, ONE, "3") as files:
        files.write(b"a")
        files.write(b"bc")
        assert files.names == [f"grpo_pl-{ONE}-3-0000.safetensors", f"grpo_pl-{ONE}-3-0001.safetensors"]
        assert [(tmp_path / name).read_bytes() for name in files.names] == [b"a", b"bc"]
    assert _names(tmp_path) == set()


def test_the_next_push_removes_what_a_killed_run_left_and_nothing_before_its_death(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        left = {f"grpo_pl-{ONE}-0.lock", f"grpo_pl-{ONE}-0-0000.safetensors"}
        with PushedFiles(tmp_path, OTHER, "0"):
            assert left < _names(tmp_path)
        assert _names(tmp_path) == left
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with PushedFiles(tmp_path, OTHER, "0") as files:
        files.write(b"new")
        assert _names(tmp_path) == {f"grpo_pl-{OTHER}-0.lock", *files.names}
    assert _names(tmp_path) == set()


def test_files_of_others_stay(tmp_path: Path) -> None:
    """What a user keeps there, and links in place of a lock."""
    kept = {"model.safetensors", "grpo_pl-mine.lock", f"grpo_pl-{ONE}-0.lock", f"grpo_pl-{ONE}-0-0000.safetensors"}
    for name in kept - {f"grpo_pl-{ONE}-0.lock"}:
        (tmp_path / name).write_bytes(b"kept")
    (tmp_path / f"grpo_pl-{ONE}-0.lock").symlink_to(tmp_path / "model.safetensors")
    with PushedFiles(tmp_path, OTHER, "0"):
        pass
    assert _names(tmp_path) == kept


def test_a_lock_that_another_run_removes_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / f"grpo_pl-{ONE}-0.lock"
    flock, calls = fcntl.flock, []

    def late(file: object, how: int) -> None:
        if not calls:
            lock.unlink()
        calls.append(how)
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with PushedFiles(tmp_path, ONE, "0"):
        assert lock.exists() and len(calls) == 2
