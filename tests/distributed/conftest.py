"""Two processes in a test: forked, joined by gloo, each running the command line as torchrun would start it."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

JOIN_SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """Exit status of every process, and the folder with what each printed, ``rank0.log`` …"""

    status: list[int | None]
    folder: Path

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(target: Callable[..., Any], rank: int, world: int, port: int, folder: Path, args: tuple[Any, ...]) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in launcher.items()})
    status = 1
    try:
        status = target(*args) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the exit handlers belong to the process that was forked


def fork(target: Callable[..., Any], *args: Any, folder: Path, world: int = 2) -> list[Any]:
    """Starts ``target(*args)`` in ``world`` processes; its return value is the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    port = _free_port()
    processes = [context.Process(target=_run, args=(target, rank, world, port, folder, args)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def join(processes: list[Any], folder: Path, seconds: float = JOIN_SECONDS) -> Ended:
    """Waits for them; those that do not end are killed and have status None."""
    for process in processes:
        process.join(seconds)
    status = [None if process.is_alive() else process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return Ended(status, folder)


@pytest.fixture
def in_processes(tmp_path: Path) -> Callable[..., Ended]:
    """``in_processes(target, *args, world=2)`` runs ``target`` in every process and fails if one of them does."""

    def run(target: Callable[..., Any], *args: Any, world: int = 2) -> Ended:
        folder = tmp_path / f"logs{len(list(tmp_path.glob('logs*')))}"
        ended = join(fork(target, *args, folder=folder, world=world), folder)
        logs = "\n".join(f"--- rank {rank}\n{ended.log(rank)[-4000:]}" for rank in range(world))
        assert ended.status == [0] * world, f"{ended.status}\n{logs}"
        return ended

    return run
