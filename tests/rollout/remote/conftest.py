"""Real servers in processes of their own, and engines that ask them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import grpo_pl.rollout.remote.routes  # noqa: F401 - what servers would import
from grpo_pl.cli.main import main
from grpo_pl.rollout.remote import RemoteEngine
from tests.forked import forked, forked_engines

PLUGINS = Path(__file__).parents[2] / "plugins"
TOKEN = "a-token-of-the-tests"
START_S = 200.0
LEASE_S = 12.0
"""Of a run that is alive and starved, too, a server hears so often."""


@pytest.fixture(scope="module")
def plugins() -> Iterator[None]:
    """Child processes of this one look for modules where it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGINS)
        yield
        sys.modules.pop("child_engines", None)


def _started(arguments: list[str], environment: dict[str, str]) -> tuple[Any, Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_pl", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, process.stdout


class Serving:
    """``grpo-pl engine`` on a free port, or again on that of one before.

    Args:
        in_fork: of this process, which is quick; else as users start it.
    """

    def __init__(self, *options: str, token: str | None = TOKEN, port: int = 0, in_fork: bool = True) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GRPO_PL_ENGINE_TOKEN"}
        environment["PYTHONPATH"] = os.pathsep.join([str(PLUGINS), *filter(None, sys.path)])
        if token is not None:
            environment["GRPO_PL_ENGINE_TOKEN"] = token
        command = ["engine", f"--port={port}", f"--lease={LEASE_S}", *options]
        if in_fork:
            self.process, output = forked(partial(main, command), env=environment)
        else:
            self.process, output = _started(command, environment)
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(output), daemon=True).start()
        deadline = time.monotonic() + START_S
        while not self._address() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.url = self._address()
        assert self.url, "\n".join(self.lines)

    def _address(self) -> str:
        line = next((line for line in list(self.lines) if " serves at " in line), "")
        return line.partition(" serves at ")[2].split(",")[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=120)


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Serving]]:
    """``serve("--lease=2", …)``; all are ended at the end of the file. The engines' processes of those that are forked
    are forked, too."""
    made: list[Serving] = []

    def start(*options: str, **how: Any) -> Serving:
        with forked_engines():
            made.append(Serving(*options, **how))
        return made[-1]

    yield start
    for server in made:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``config("child_engines.NativeInChild", pause_s=0.02)``: the option that names an engine for a server."""

    def write(name: str, **fields: Any) -> str:
        file = tmp_path_factory.mktemp("engines") / "engine.yaml"
        file.write_text(yaml.safe_dump({"model": {"engine": {"class_path": name, "init_args": fields}}}))
        return f"--config={file}"

    return write


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


@pytest.fixture
def connect(token_file: str) -> Iterator[Callable[..., RemoteEngine]]:
    """``connect(url, …, reconnect_s=5)``; all are closed with the test."""
    made: list[RemoteEngine] = []

    def engine(*urls: str, **fields: Any) -> RemoteEngine:
        made.append(RemoteEngine(urls=list(urls), **{"token_file": token_file, "reconnect_s": 60.0, **fields}))
        return made[-1]

    yield engine
    for one in made:
        one.close()
