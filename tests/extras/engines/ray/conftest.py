"""A real cluster of two nodes on this machine, with a token, and engines whose actors it runs."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_pl.extras.engines.ray import RayEngine
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.types import Rollout
from tests.rollout.drawn import generate, make_keys

ROOT = Path(__file__).parents[4]
PLUGINS = ROOT / "tests/plugins"
STORE_BYTES = 100_000_000
START_S = 120.0


MARKS = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: see docs/engines.md"),
]


class Cluster:
    """A head, on which this process is, and nodes of two CPUs; ``ray start`` stays, so that all of a node are its
    children."""

    def __init__(self, folder: Path, *, head_cpus: int = 0, nodes: int = 2) -> None:
        (folder / "token").write_text("a-token-of-the-tests-that-is-long-enough")
        self.folder = folder
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_memory_monitor_refresh_ms": "0",  # others use this machine
            "RAY_worker_niceness": "0",  # 15 by default, with which actors would starve beside them
            "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(ROOT), *filter(None, sys.path)]),
            "GRPO_PL_NATIVE": "torch",
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._started = 0
        head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder / 'r'}"]
        self.address = self._start([*head, f"--num-cpus={head_cpus}"], r"--address='([^']+)'")
        for _ in range(nodes):
            self.add()

    def add(self, *, cpus: int = 2, **environment: str) -> None:
        """Another node."""
        self._start([f"--address={self.address}", f"--num-cpus={cpus}"], r"(Ray runtime started)", **environment)

    def lose(self, *, whole: bool) -> None:
        """The newest node ends: all of its processes at once, or its raylet, and what then ends with that."""
        node = self.nodes.pop()
        if whole:
            _kill(node)
        else:
            self.raylet(node).kill()
            node.wait(60)

    def _start(self, arguments: list[str], told: str, **environment: str) -> str:
        size = [f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", "--block"]
        self._started += 1
        log = self.folder / f"node{self._started}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *size],
                env=self.environment | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(process)
        wait(lambda: re.search(told, log.read_text()) is not None or process.poll() is not None, START_S)
        found = re.search(told, log.read_text())
        assert found is not None, log.read_text()
        return found[1]

    @staticmethod
    def raylet(node: "subprocess.Popen[bytes]") -> psutil.Process:
        children = psutil.Process(node.pid).children(recursive=True)
        return next(child for child in children if child.name() == "raylet")

    def actors(self) -> list[psutil.Process]:
        """Processes of this cluster that draw."""
        found = []
        for node in self.nodes:
            for process in psutil.Process(node.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "EngineActor" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def stored_objects(self) -> int:
        """How many objects lie in the stores of all nodes."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "memory", "--stats-only", f"--address={self.address}"]
        told = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout
        found = re.search(r"Plasma memory usage .* (\d+) objects", told)
        assert found is not None, told
        return int(found[1])

    def end(self) -> None:
        for node in self.nodes:
            _kill(node)


def _kill(node: "subprocess.Popen[bytes]") -> None:
    if node.poll() is None:
        family = psutil.Process(node.pid).children(recursive=True)
        node.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()


def wait(done: Callable[[], bool], seconds: float) -> None:
    """Until ``done``, or an AssertionError."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Which this process may join as well: Ray reads its variables when it is imported. The decode kernel would end a
    rollout before anything can."""
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder,  # paths of sockets
        pytest.MonkeyPatch.context() as patch,
    ):
        started = Cluster(Path(folder))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "GRPO_PL_NATIVE"):
            patch.setenv(name, started.environment[name])
        patch.syspath_prepend(PLUGINS)
        yield started
        started.end()


@pytest.fixture
def connect(cluster: Cluster) -> Iterator[Callable[..., RayEngine]]:
    """``connect("NativeInChild", actors=2, pause_s=0.01)``: fields of the engine of that name go to it. An actor takes
    a node for itself."""
    import child_engines

    made: list[RayEngine] = []

    def engine(name: str = "NativeInChild", *, actors: int = 1, **fields: Any) -> RayEngine:
        own = {"cpus": 2.0} | {key: fields.pop(key) for key in ("cpus", "gpus", "start_s") if key in fields}
        worker = getattr(child_engines, name)(threads=1, **fields)
        made.append(RayEngine(engine=worker, actors=actors, address=cluster.address, **own))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def draw(engine: RolloutEngine, model: Any, *, length: int = 24, prompts: int = 8, **how: Any) -> Rollout:
    """8 × 8 rows, unless told otherwise."""
    asked = [[(7 * p + 3 * t) % 36 + 1 for t in range(9 - p % 4)] for p in range(prompts)]
    return generate(engine, model, asked, make_keys(prompts, 8), length=length, eos=[6], **how)
