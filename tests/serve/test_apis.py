"""``PolicyAPI`` and ``RewardAPI`` in somebody's own LitServer, and what ``PolicyServer`` is made of."""

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litserve
import openai
import psutil
import pytest

from serve import PolicyAPI, PolicyServer, RewardAPI
from serve.calls import Deadline
from serve.errors import ApiError
from tests.process_list import lives
from tests.serve.bodies import CHAT, HELLO, SCORE, streamed
from tests.serve.conftest import START_S, wait_until

ROOT = Path(__file__).parents[2]
ASK = {"messages": HELLO, "max_tokens": 12, "seed": 3}


class Own:
    """``examples/server.py`` as a process."""

    def __init__(self, export: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, str(ROOT / "examples" / "server.py"), str(export), str(self.port)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        self.log = log
        wait_until(self.is_ready, START_S)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.call("/health")[0] == 200)
        except OSError:
            return False

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                told = answer.read().decode()
                return answer.status, json.loads(told) if told.startswith("{") else told
        except urllib.error.HTTPError as error:
            told = error.read().decode()
            return error.code, json.loads(told) if told.startswith("{") else told


@pytest.fixture(scope="module")
def own(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    server = Own(export, tmp_path_factory.mktemp("own") / "log")
    yield server
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_it_answers_as_the_whole_server_does(own: Own, server: Any) -> None:
    items = {"items": [{"completion": r"\boxed{5}", "answer": "5"}], "group": True}
    logprobs = {**ASK, "n": 3, "logprobs": True, "top_logprobs": 2}
    for path, body in ((CHAT, ASK), (CHAT, logprobs), ("/v1/completions", {"prompt": "1", "seed": 1}), (SCORE, items)):
        status, told = own.call(path, body)
        assert status == 200, told
        expected = server.ask(path, body)
        for answer in (told, expected):
            for name in ("id", "created", "model"):
                answer.pop(name, None)
            for item in answer.get("items", []):
                item.pop("ms")
        assert told == expected
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{own.port}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "tiny", "n": 2, **ASK}
    whole = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    assert streamed(client.chat.completions.create(**options, stream=True), 2) == whole


@pytest.mark.slow
def test_its_errors_are_those_of_the_whole_server(own: Own) -> None:
    wrong: list[tuple[str, Any, int, str]] = [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {**ASK, "model": "other"}, 404, "model"),
        (CHAT, {**ASK, "messages": [{"role": "user", "content": "\u03c0"}], "stream": True}, 400, "messages"),
        (SCORE, {"items": [{"completion": "1"}]}, 400, "items.0.answer"),
    ]
    for path, body, status, param in wrong:
        told = own.call(path, body)
        assert (told[0], told[1]["error"]["param"]) == (status, param), told


@pytest.mark.slow
def test_sigterm_leaves_no_process_of_it(own: Own) -> None:
    main = psutil.Process(own.process.pid)
    family = [main, *main.children(recursive=True)]
    own.process.terminate()
    own.process.wait(60)
    wait_until(lambda: not any(lives(process.pid) for process in family))


@pytest.mark.parametrize("limits", [{"max_completions": 0}, {"max_queue": 0}, {"deadline": 0.0}, {"deadline": -1.0}])
def test_senseless_limits_are_refused_at_once(export: Path, limits: dict[str, Any]) -> None:
    for kind in (PolicyAPI, RewardAPI):
        if kind is RewardAPI and "max_completions" in limits:
            continue
        with pytest.raises(ValueError, match=next(iter(limits))):
            kind(export, **limits)


def test_a_folder_without_a_model_is_refused_at_once(tmp_path: Path) -> None:
    for kind in (PolicyAPI, RewardAPI):
        with pytest.raises(ValueError, match="holds neither"):
            kind(tmp_path)


def test_a_second_worker_is_refused(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not get the cancellations of the first one's requests."""
    monkeypatch.setenv("LITSERVE_WORKER_ID", "1")
    with pytest.raises(ValueError, match="one worker on one device"):
        PolicyAPI(export).setup("cpu")


def test_the_server_is_a_litserver_and_touches_nothing_private_of_it() -> None:
    assert issubclass(PolicyServer, litserve.LitServer)
    made = litserve.LitServer(litserve.test_examples.SimpleLitAPI())
    names = [*vars(litserve.LitServer), *vars(made), "_transport"]  # which it sets when it runs
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    assert {"_init_manager", "_shutdown_event"} <= private
    for file in (ROOT / "serve").glob("*.py"):
        text = file.read_text()
        assert not re.search(r"(from|import) litserve.* _|(^|[^_])inference_worker\b", text, re.MULTILINE), file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                assert node.attr not in private, (file, node.lineno, node.attr)


def test_a_queue_of_litserves_that_is_gone_is_a_lost_worker(export: Path) -> None:
    spec = PolicyAPI(export).spec

    class Gone:
        def put(self, _: Any) -> None:
            raise BrokenPipeError

    async def ask() -> None:
        with pytest.raises(ApiError) as refused:
            await spec.ask(None, deadline=Deadline(30.0))
        assert refused.value.status == 503

    spec.request_queue = Gone()
    spec.response_buffer, spec.data_streamer = {}, litserve.LitServer.data_streamer
    asyncio.run(ask())
    assert not spec.is_alive
