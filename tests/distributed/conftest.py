"""Two processes in a test: forked, joined by gloo, each running the command line as torchrun would start it."""

import json
import multiprocessing
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from grpo_pl.distributed.collective import Collective
from grpo_pl.files.checkpoints import remove, rollouts_of
from grpo_pl.files.sharded_checkpoints import read_checkpoint

JOIN_SECONDS = 280


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


# --- the runs that several tests look at ------------------------------------------------------------------------------

STRATEGIES = {
    "ddp": ["--config=configs/strategy/ddp.yaml"],
    "fsdp": ["--config=configs/strategy/fsdp.yaml"],
    "sharded": [
        "--config=configs/strategy/fsdp.yaml",
        "--trainer.strategy.init_args.sharded_checkpoints=true",
        "--trainer.strategy.init_args.defer_gradient_sync=true",
    ],
    "tensor": ["--config=configs/strategy/tensor_parallel.yaml"],
    "tensor_of_4": ["--config=configs/strategy/tensor_parallel.yaml"],
}
PROCESSES = {"single": 1, "tensor_of_4": 4}
"""Of a run; 2 of all others."""


def grpo_pl(folder: Path, cache: Path, *args: object) -> int:
    """``grpo-pl`` with its runs under ``folder``, where a ``fit`` also leaves its ``samples<rank>.jsonl``."""
    from grpo_pl.cli.main import main

    os.environ["GRPO_PL_CACHE"] = str(cache)
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
    verb, *rest = map(str, args)
    recording = ["--trainer.callbacks+=user_parts.KeepSamples"] if verb == "fit" else []
    return main([verb, *rest, f"--runs_dir={folder}", *recording])


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    def checkpoint(self, rollouts: int) -> Path:
        return self.path / "checkpoints" / f"rollout-{rollouts:06d}.ckpt"

    def state(self, rollouts: int) -> dict[str, Any]:
        return read_checkpoint(self.checkpoint(rollouts))

    def samples(self) -> list[Any]:
        files = sorted(self.path.parent.glob("samples*.jsonl"))
        return sorted(map(json.loads, {line for file in files for line in file.read_text().splitlines()}))

    def copy_until(self, rollouts: int, folder: Path) -> "Run":
        """The same run as if it had been killed at some moment after its checkpoint at ``rollouts``."""
        shutil.copytree(self.path, folder / self.path.name, symlinks=True)
        copy = Run(folder / self.path.name)
        for path in copy.path.glob("checkpoints/rollout-*.ckpt"):
            if rollouts_of(path) > rollouts:
                remove(path)
        return copy


@pytest.fixture(scope="session")
def five_rollouts() -> Path:
    """The configuration of all these runs."""
    return Path(__file__).with_name("five.yaml")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the one cold start."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def completed(cache: Path, five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """``completed("single" | "ddp" | "fsdp" | "sharded")``: that run of five rollouts, or of another configuration,
    made at most once."""
    made: dict[tuple[str, Path], Run] = {}

    def run(name: str, config: Path = five_rollouts) -> Run:
        if (name, config) not in made:
            folder = tmp_path_factory.mktemp(name)
            world = PROCESSES.get(name, 2)
            flags = STRATEGIES.get(name, [])
            args = (folder / "runs", cache, "fit", f"--config={config}", *flags)
            ended = join(fork(grpo_pl, *args, folder=folder, world=world), folder)
            assert ended.status == [0] * world, "\n".join(ended.log(rank)[-4000:] for rank in range(world))
            made[name, config] = Run(folder / "runs" / config.stem)
        return made[name, config]

    return run


@pytest.fixture
def like_one_process(completed: Callable[..., Run], read_metrics: Callable[..., Any]) -> Callable[..., Run]:
    """``like_one_process("ddp", config, rollouts=2)``: fails unless two processes drew and learned what one does, whose
    run it returns."""

    def compare(name: str, config: Path, *, rollouts: int) -> Run:
        single, ours = completed("single", config), completed(name, config)
        assert ours.samples() == single.samples()
        for mine, theirs in zip(read_metrics(ours.metrics), read_metrics(single.metrics), strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert float(mine[key]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), key
        before, after = single.state(rollouts)["state_dict"], ours.state(rollouts)["state_dict"]
        difference = sum((after[key] - value).double().square().sum() for key, value in before.items()) ** 0.5
        assert difference / sum(value.double().square().sum() for value in before.values()) ** 0.5 <= 1e-5
        return single

    return compare


@pytest.fixture
def command(cache: Path, in_processes: Callable[..., Ended]) -> Callable[..., Ended]:
    """``command(folder, "fit", …, world=2)``: ``grpo-pl`` in that many processes."""

    def run(folder: Path, *args: object, world: int = 2) -> Ended:
        return in_processes(grpo_pl, folder, cache, *args, world=world)

    return run


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Callable[..., Any]:
    """``start(target, folder, "fit", …)``: two running processes, and a function that waits for their end."""

    def begin(target: Callable[..., int], folder: Path, *args: object) -> tuple[list[Any], Callable[..., Ended]]:
        processes = fork(target, folder, cache, *args, folder=tmp_path / "started")
        return processes, lambda seconds=JOIN_SECONDS: join(processes, tmp_path / "started", seconds)

    return begin


def _on_two_ranks(work: Callable[[Collective], Any]) -> list[Any]:
    """Runs ``work`` on two forked processes and returns what each came to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=_rank, args=(rank, port, work, pipes[rank][1])) for rank in range(2)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        results = [receiver.recv() if receiver.poll(200) else "no answer" for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for result in results:
        assert not isinstance(result, str), result
    return results


def _rank(rank: int, port: int, work: Callable[[Collective], Any], sender: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        sender.send(work(Collective(rank=rank, world=2)))
        dist.destroy_process_group()
    except Exception:
        sender.send(traceback.format_exc())


@pytest.fixture
def on_two_ranks() -> Callable[[Callable[[Collective], Any]], list[Any]]:
    """``on_two_ranks(work)``: what ``work(collective)`` comes to on each of two processes."""
    return _on_two_ranks
