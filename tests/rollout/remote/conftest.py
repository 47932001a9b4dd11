"""Real servers in processes of their own, as users start them, and engines that ask them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from grpo_pl.rollout.remote import RemoteEngine

PLUGINS = Path(__file__).parents[2] / "plugins"
TOKEN = "a-token-of-the-tests"
START_S = 200.0
LEASE_S = 4.0


@pytest.fixture(scope="module")
def plugins() -> Iterator[None]:
    """Child processes of this one look for modules where it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGINS)
        yield
        sys.modules.pop("child_engines", None)


class Serving:
    """``grpo-pl engine`` on a free port, or again on that of one before."""

    def __init__(self, *options: str, token: str | None = TOKEN, port: int = 0) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GRPO_PL_ENGINE_TOKEN"}
        environment["PYTHONPATH"] = os.pathsep.join([str(PLUGINS), *filter(None, sys.path)])
        if token is not None:
            environment["GRPO_PL_ENGINE_TOKEN"] = token
        given = [f"--port={port}", f"--lease={LEASE_S}", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_pl", "engine", *given],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + START_S
        while not self._address() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.url = self._address()
        assert self.url, "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

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
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Serving]]:
    """``serve("--lease=2", …)``; all are ended at the end of the file."""
    made: list[Serving] = []

    def start(*options: str, **how: Any) -> Serving:
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
