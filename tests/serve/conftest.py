"""A small exported policy and server processes over it."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

import serve.server  # noqa: F401 - what servers would import
from grpo_pl.callbacks.record import plain_fields
from grpo_pl.cli.main import main
from grpo_pl.files.checkpoints import seal
from grpo_pl.files.runs import RunFolder
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.pretrained import MANIFEST
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import FormatReward, MathReward
from grpo_pl.types import SamplingParams
from tests.browser import Browser
from tests.forked import Forked, with_forked_workers
from tests.serve.bodies import CHAT, post

ROOT = Path(__file__).parents[2]
_KEYS = ("GRPO_PL_API_KEY",)
START_S = 300.0  # importing torch three times over, on a machine that does other things too
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # sharp enough for texts to differ, soft enough for an end token now and then
}
"""Random weights: nothing here is about what the policy says."""


def write_export(folder: Path) -> Path:
    """A tiny policy with random weights in ``folder/tiny/export``, and what its run noted beside it."""
    folder = folder / "tiny" / "export"
    policy = PolicyConfig(from_scratch=SHAPE)
    tokenizer = load_tokenizer(policy)
    export_policy(
        folder,
        TrainedWith(
            template=PromptTemplate(prefill="<think>"),
            rewards=[MathReward().spec(), FormatReward(weight=0.5, partial=True).spec()],
            sampling=SamplingParams(max_completion_length=40),
            algorithm=plain_fields(GRPOAlgorithm(scale="none", aggregation="constant", beta=0.0)),  # Dr. GRPO
        ),
        model=load_model(policy, tokenizer),
        tokenizer=tokenizer,
    )
    example = {"problem": "12+34=", "answer": "46", "columns": {}}
    RunFolder(folder.parent).record.write_text(json.dumps({"examples": [example]}))  # as a run notes it
    return folder


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("serve"))


def altered(export: Path, folder: Path, **manifest: Any) -> Path:
    """A copy of an export with other entries in its manifest."""
    shutil.copytree(export, folder)
    told = json.loads((folder / MANIFEST).read_text()) | manifest
    (folder / MANIFEST).write_text(json.dumps(told))
    return folder


def run_of_export(export: Path, folder: Path) -> Path:
    """A run folder whose two checkpoints hold the weights of the export times two and ten."""
    (folder / "checkpoints").mkdir(parents=True)
    model = find_model(export)
    config = {"policy": {"path": None, "from_scratch": SHAPE}, "template": model.template.to_dict()}
    config |= {"rewards": list(model.rewards), "sampling": {"max_completion_length": 17, "temperature": 0.5}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": config}))
    for rollouts in (2, 10):
        write_checkpoint(folder, export, rollouts)
    (folder / "checkpoints" / "last.ckpt").symlink_to("rollout-000010.ckpt")
    return folder


def write_checkpoint(folder: Path, export: Path, rollouts: int) -> Path:
    """A whole checkpoint of a run: the weights of the export times the number of rollouts."""
    weights = {f"policy.{name}": rollouts * weight for name, weight in load_file(export / "model.safetensors").items()}
    path = folder / "checkpoints" / f"rollout-{rollouts:06d}.ckpt"
    torch.save({"state_dict": weights, "global_step": rollouts}, path)
    seal(path, {"rollouts": rollouts})
    return path


@pytest.fixture
def run(export: Path, tmp_path: Path) -> Path:
    return run_of_export(export, tmp_path / "my-run")


@pytest.fixture(scope="session")
def shape() -> dict[str, Any]:
    """The configuration that the exported policy was made from."""
    return SHAPE


def _as_from_a_terminal(descriptors: int | None) -> None:
    """In the new process: SIGHUP ends it, which `nohup` before the tests would have it ignore."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


class Running:
    """One server process.

    Args:
        interpreter: options of Python, as which it is started as users do; else in a fork of this process, and so are
            its workers, which is quick.
    """

    def __init__(
        self,
        model: Path | None,
        log: Path,
        *options: str,
        api_key: str | None = None,
        descriptors: int | None = None,
        interpreter: Sequence[str] = (),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.key, self.address, self._log = api_key, f"http://127.0.0.1:{self.port}", log
        self.context: ssl.SSLContext | None = None
        environment = {name: value for name, value in os.environ.items() if name not in _KEYS}
        self.scratch = log.parent / "tmp"
        self.scratch.mkdir()
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch)} | (
            {"GRPO_PL_API_KEY": api_key} if api_key else {}
        )
        given = [*([] if model is None else ["--model", str(model)]), "--port", str(self.port), *options]
        self.process: Any
        with log.open("w") as out:
            if not interpreter and descriptors is None:
                run = partial(with_forked_workers, partial(_serve, given))
                self.process = Forked(run, env=environment, output=out.fileno())
            else:
                self.process = subprocess.Popen(
                    [sys.executable, *interpreter, "-m", "serve", *given],
                    cwd=ROOT,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a process group of its own, as a service manager would make
                    preexec_fn=partial(_as_from_a_terminal, descriptors),
                )
        wait_until(lambda: self.process.poll() is not None or "\ncurl " in self.log, START_S)
        assert self.process.poll() is None, self.log
        main = psutil.Process(self.process.pid)
        self.family = [main, *main.children(recursive=True)]
        others = ("resource_tracker", "rewards.sandbox.worker")
        self._workers = [p for p in main.children() if not any(name in " ".join(p.cmdline()) for name in others)]

    @property
    def log(self) -> str:
        return self._log.read_text()

    imports: list[str]
    """What its processes had imported when it was ready, and …"""
    late_imports: list[str]
    """… what they imported for the first chats."""

    def imported(self) -> list[str]:
        return re.findall(r"import time:.*\|\s+(\S+)$", self.log, re.MULTILINE)

    def worker(self, name: str) -> psutil.Process:
        """The process with LitServe's queues (``manager``), the model (``generate``), the rewards (``score``) or the
        routes (``http``), in the order of their start."""
        started = sorted(self._workers, key=lambda process: (process.create_time(), process.pid))
        return dict(zip(("manager", "generate", "score", "http"), started, strict=True))[name]

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded answer, headers."""
        authorization = {"Authorization": f"Bearer {key or self.key}"} if key or self.key else {}
        given = {"Content-Type": "application/json", **authorization, **(headers or {})}
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self.context) as answer:
                status, raw, sent = answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            status, raw, sent = error.code, error.read(), dict(error.headers)
        is_json = sent.get("content-type", "").startswith("application/json")
        return status, json.loads(raw) if is_json else raw.decode(), sent

    def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        return self.call("POST", path, body, **options)[:2]

    def ask(self, path: str, body: Any, **options: Any) -> Any:
        """The answer to a request that must succeed."""
        status, answer = self.post(path, body, **options)
        assert status == 200, answer
        return answer

    def refusal(self, path: str, body: Any, status: int = 400, **options: Any) -> dict[str, Any]:
        """The error of a request that must be refused."""
        return error_of(self.post(path, body, **options), status)

    def send(self, path: str, body: Any) -> socket.socket:
        """A request whose answer nobody has read yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        authorization = [f"Authorization: Bearer {self.key}"] if self.key else []
        connection.sendall(post(path, json.dumps(body).encode(), *authorization))
        return connection

    def exchange(self, request: bytes) -> bytes:
        """What comes back for bytes on a connection of their own, until the server closes it or has answered once."""
        answer = b""
        refused = contextlib.suppress(ConnectionError)  # a server may refuse to read on
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection, refused:
            connection.sendall(request)
            while not _is_whole(answer) and (part := connection.recv(1 << 16)):
                answer += part
        return answer

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=self.key or "none", max_retries=0, timeout=60.0, **options
        )

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.call("GET", "/metrics")[1].splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith((f"grpo_pl_{name} ", f"grpo_pl_{name}{{"))
        )

    def is_idle(self) -> bool:
        return all(self.metric(name) == 0 for name in ("running_sequences", "waiting_requests", "open_requests"))

    def ask_to_stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.ask_to_stop()
        try:
            return self.process.wait(60.0)
        finally:
            for process in self.family:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()


def error_of(answer: tuple[int, Any], status: int) -> dict[str, Any]:
    """The error of an answer, whose shape is checked."""
    assert answer[0] == status, answer
    (error,) = answer[1].values()
    assert set(answer[1]) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"]
    return dict(error)


def _serve(given: list[str]) -> int:
    os.chdir(ROOT)
    return main(["serve", *given])


def _is_whole(answer: bytes) -> bool:
    head, blank, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(blank) and length is not None and len(body) >= int(length[1])


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


STARTED: list[Running] = []
"""The servers that have not been ended."""
BROWSERS: list[Browser] = []
"""The browser, if there is one."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """Ends the servers and the browser after the last test of this folder: they take time of the processor while they
    live."""
    try:
        yield
    finally:
        if nextitem is None or not nextitem.nodeid.startswith("tests/serve/"):
            for server in STARTED:  # all at once, and then wait for each
                server.ask_to_stop()
            while STARTED:
                STARTED.pop().stop()
            while BROWSERS:
                BROWSERS.pop().close()


@pytest.fixture(scope="session")
def start(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Running]:
    """``start("--max-queue", "1", api_key="secret")``: a server of one's own, ended with the tests of this folder."""

    def run(*options: str, model: Path | None = export, **further: Any) -> Running:
        log = tmp_path_factory.mktemp("log") / "server.log"
        STARTED.append(Running(model, log, *options, **further))
        return STARTED[-1]

    return run


SECRETS = {
    "HF_TOKEN": "secret-hf",
    "HUGGING_FACE_HUB_TOKEN": "secret-hub",
    "AWS_SECRET_ACCESS_KEY": "secret-aws",
    "OPENAI_API_KEY": "secret-openai",
    "WANDB_API_KEY": "secret-wandb",
    "DATABASE_URL": "postgres://user:secret-database@host",
    "MY_SECRET": "secret-mine",
}


@pytest.fixture(scope="session")
def server(start: Callable[..., Running]) -> Running:
    """The one that most tests share, as a user starts it, with secrets around it; its interpreters report what they
    import, and it has answered a chat of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        server = start("--deadline", "60", interpreter=("-X", "importtime"))
    server.imports = server.imported()
    asked = {"messages": [{"role": "user", "content": "12+34="}], "max_tokens": 8}
    for change in ({}, {"n": 4}, {"stream": True}, {"stream": True, "n": 4}):
        assert server.call("POST", CHAT, asked | change)[0] == 200
    server.late_imports = server.imported()[len(server.imports) :]
    return server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``cert.pem`` for localhost and its ``key.pem``."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="session")
def client(server: Running) -> openai.OpenAI:
    return server.openai()


@pytest.fixture(scope="session")
def narrow(start: Callable[..., Running]) -> Running:
    """One with two slots and a queue of one, and patience."""
    return start("--max-batch-size", "2", "--max-queue", "1", "--deadline", "120")


@pytest.fixture(scope="session")
def crowded(start: Callable[..., Running]) -> Running:
    """One with a key, two slots, a queue of one, and little patience."""
    return start("--max-batch-size", "2", "--max-queue", "1", "--deadline", "2", api_key="secret-1")


@pytest.fixture(scope="session")
def mixed_export(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose rewards are those of a mixture and hold further ones."""
    names = ["Math", "Exact", *(["ReasoningGym"] if find_spec("reasoning_gym") else [])]
    held = [{"class_path": f"grpo_pl.rewards.{name}Reward", "init_args": {}} for name in names]
    by_source = dict(zip(("algebra", "words", "zebras"), held, strict=False))
    mixture = {"name": "right", "correctness": True, "rewards": by_source}
    lengths = {"shape": "cosine", "max_length": 40, "correct": held[0]}
    rewards = [
        {"class_path": "grpo_pl.rewards.PerSource", "init_args": mixture},
        {"class_path": "grpo_pl.rewards.LengthReward", "init_args": lengths},
    ]
    return altered(export, tmp_path_factory.mktemp("mixed") / "export", rewards=rewards)


@pytest.fixture(scope="session")
def mixed(start: Callable[..., Running], mixed_export: Path) -> Running:
    """One with a key and such rewards, and with secrets around it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        return start(model=mixed_export, api_key="secret-server")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    BROWSERS.append(Browser(tmp_path_factory.mktemp("profile"), "--host-resolver-rules=MAP *.example 127.0.0.1"))
    return BROWSERS[-1]
