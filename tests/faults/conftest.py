"""A tiny quickstart that can be killed: ``grpo-pl fit`` in a forked process, with a death planned or not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest
import torch

CONFIG = Path(__file__).with_name("tiny.yaml")
PLUGINS = Path(__file__).parents[1] / "plugins"
END_SECONDS = 280
Stage = Literal["cold start", "rollout", "environment", "reward", "update", "save", "seal", "validation"]


@dataclass(frozen=True)
class Death:
    """A signal in the middle of a stage of a rollout, counted within the process from 1."""

    stage: Stage
    visit: int
    number: signal.Signals = signal.SIGKILL


def _plan(death: Death) -> None:
    """Lets this process send itself the signal at the given visit of a stage, half-way through what the stage does."""
    from grpo_pl.callbacks import checkpoint
    from grpo_pl.extras.agents import EnvironmentPool
    from grpo_pl.rollout.decoding import DecodeMonitor
    from grpo_pl.training.cold_start_fit import SaveNowAndThen
    from grpo_pl.training.collect import Collector
    from grpo_pl.training.optimization import Optimization
    from grpo_pl.training.policy_module import PolicyModule

    visits = 0

    def pass_by() -> None:
        nonlocal visits
        visits += 1
        if visits == death.visit:
            os.kill(os.getpid(), death.number)

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (pass_by(), original(*args, **kwargs))[1])

    if death.stage == "save":
        save = torch.save

        def half(state: Any, file: BinaryIO) -> None:
            save(state, file)
            file.truncate(file.tell() // 2)
            pass_by()
            file.seek(0)
            file.truncate()
            save(state, file)

        torch.save = half  # type: ignore[assignment]
    else:
        owner, name = {
            "cold start": (SaveNowAndThen, "on_train_batch_end"),  # a step is done, its checkpoint is not written
            "rollout": (DecodeMonitor, "check_stop"),  # between two tokens
            "environment": (EnvironmentPool, "step"),  # some episodes of a turn have been told, others not
            "reward": (Collector, "score"),
            "update": (Optimization, "clip_gradients"),  # gradients are there, weights have not moved
            "seal": (checkpoint, "seal"),  # the checkpoint lies there without its marker
            "validation": (PolicyModule, "answer"),
        }[death.stage]
        before(owner, name)


def _keep_each_step() -> None:
    """Lets a cold start write a checkpoint after every step."""
    from grpo_pl.training import cold_start_fit

    cold_start_fit.SAVE_EVERY_SECONDS, cold_start_fit.LARGEST_SHARE = 0.0, float("inf")


def _child(
    configs: Sequence[Path], folder: Path, cache: Path, log: Path, args: tuple[str, ...], death: Death | None
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ["GRPO_PL_CACHE"] = str(cache)
    sys.path.append(str(PLUGINS))
    status = 1
    try:
        from grpo_pl.cli.main import main

        if death is not None:
            _keep_each_step()
            _plan(death)
        status = main(["fit", *(f"--config={file}" for file in configs), f"--runs_dir={folder}", *args])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@dataclass(frozen=True)
class Quickstart:
    """One run folder that processes work on one after the other."""

    folder: Path
    cache: Path
    configs: tuple[Path, ...] = (CONFIG,)

    @property
    def run(self) -> Path:
        return self.folder / self.configs[0].stem

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, *args: str, death: Death | None = None) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork")
        given = (self.configs, self.folder, self.cache, self.folder / "log", args, death)
        process = context.Process(target=_child, args=given)
        process.start()
        return process

    def killed_after(self, seconds: float) -> bool:
        """Goes on with the run and kills it after so long; false if it has come to its end before."""
        process = self.start("--resume")
        process.join(seconds)
        if not process.is_alive():
            assert process.exitcode == 0, self.log
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return True

    def fit(self, *args: str, death: Death | None = None) -> int:
        """Exit status; −9 after SIGKILL."""
        process = self.start(*args, death=death)
        process.join(END_SECONDS)
        assert process.exitcode is not None, f"still running\n{self.log}"
        return int(process.exitcode)


@pytest.fixture(autouse=True)
def _slow_tests_start_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """And fork none, for some find an engine's process by its command line."""
    if request.node.get_closest_marker("slow"):
        monkeypatch.setattr("grpo_pl.processes.child_process.subprocess", subprocess)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def quickstart(tmp_path: Path, cache: Path) -> Quickstart:
    return Quickstart(tmp_path / "runs", cache)


@pytest.fixture
def played(quickstart: Quickstart) -> Quickstart:
    """One of many turns."""
    return replace(quickstart, configs=(PLUGINS / "down.yaml",))


@pytest.fixture
def asked(quickstart: Quickstart) -> Quickstart:
    """One whose policy answers agents over HTTP."""
    return replace(quickstart, configs=(PLUGINS / "asks.yaml",))


@pytest.fixture
def ahead(quickstart: Quickstart) -> Quickstart:
    """One whose rollouts are drawn beside the updates."""
    return replace(quickstart, configs=(CONFIG, CONFIG.with_name("ahead.yaml")))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[[tuple[Path, ...]], Quickstart]:
    """``undisturbed(configs)``: the run to which all others of these files are compared, made once."""
    made: dict[tuple[Path, ...], Quickstart] = {}

    def run(configs: tuple[Path, ...]) -> Quickstart:
        if configs not in made:
            made[configs] = Quickstart(tmp_path_factory.mktemp("undisturbed") / "runs", cache, configs)
            assert made[configs].fit() == 0, made[configs].log
        return made[configs]

    return run


@pytest.fixture(scope="session")
def assert_same_end(
    undisturbed: Callable[[tuple[Path, ...]], Quickstart], read_metrics: Callable[..., Any]
) -> Callable[[Quickstart], None]:
    """Weights, optimiser, counters and ``metrics.csv`` (clock readings left out) equal those of the undisturbed run."""
    from grpo_pl.files.sharded_checkpoints import read_checkpoint

    def check(quickstart: Quickstart) -> None:
        both = (quickstart, undisturbed(quickstart.configs))
        ours, theirs = (read_checkpoint(one.run / "checkpoints" / "last.ckpt") for one in both)
        assert differences(ours, theirs) == []
        ours, theirs = (read_metrics(one.run / "metrics.csv") for one in both)
        assert ours == theirs

    return check


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    if isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: {sorted(map(str, ours.keys() ^ theirs.keys()))}"]
        return [line for key in theirs for line in differences(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(theirs, list | tuple):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}.{i}")]
    equal = torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    return [] if equal else [f"{path}: {ours} != {theirs}"]
