"""Starts a server with the quickstart's architecture in its own process, and times the engine alone beside it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from common import free_port, request_of

from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import FormatReward, MathReward
from grpo_pl.rollout.native.decoder_choice import default_decoder
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import SamplingParams

ROOT = Path(__file__).parents[1]
PROMPT = "347+285="


def build_export(folder: Path) -> Path:
    """Exports a model with the quickstart's architecture and random weights."""
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["model"]["policy"]["from_scratch"]
    policy = PolicyConfig(from_scratch={**config, "max_position_embeddings": 512})
    tokenizer = load_tokenizer(policy)
    model = load_model(policy, tokenizer)
    export_policy(
        folder,
        TrainedWith(
            template=PromptTemplate(),
            rewards=[MathReward().spec(), FormatReward(weight=0.1).spec()],
            sampling=SamplingParams(max_completion_length=256),
            decoder=default_decoder(model),
        ),
        model=model,
        tokenizer=tokenizer,
    )
    return folder


class Server:
    """A server process, and simple clients of it."""

    def __init__(self, model: Path, *options: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "serve", "--model", str(model), "--port", str(self.port), *options]
        began = time.perf_counter()
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("curl"):
            if not line:
                raise RuntimeError("the server did not start.")
        self.ready_s = time.perf_counter() - began
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.ready_cpu_s = sum(sum(process.cpu_times()[:2]) for process in family)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {data[:300]!r}")
        return json.loads(data)

    def processes(self) -> dict[str, psutil.Process]:
        """The process that answers HTTP, the workers, and the process with LitServe's queues."""
        children = psutil.Process(self.process.pid).children()
        started = sorted(children, key=lambda child: (child.create_time(), child.pid))
        own = [child for child in started if "resource_tracker" not in " ".join(child.cmdline())]
        return dict(zip(("queues", "generate", "score", "front"), own, strict=True))

    def rss_mb(self) -> dict[str, float]:
        """Resident memory of each process in MiB."""
        return {name: process.memory_info().rss / 2**20 for name, process in self.processes().items()}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that each process has used so far."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes().items()}

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def running(model: Path) -> Iterator[Server]:
    server = Server(model)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def seconds_of_draws(model: Any, prompts: Sequence[list[int]], *, group: int, tokens: int, seed: int = 0) -> float:
    """What the native engine takes for ``group`` completions of ``tokens`` tokens for each prompt."""
    request = request_of(prompts, group, tokens, seed=seed)
    began = time.perf_counter()
    NativeEngine().generate(model, request)
    return time.perf_counter() - began
