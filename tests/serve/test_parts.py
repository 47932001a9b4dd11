"""A ``LitServer`` of one's own with ``PolicyAPI`` and ``RewardAPI``, over HTTP: the openai client, scores, the end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import litserve
import openai
import psutil
import pytest
from fastapi import BackgroundTasks, HTTPException

from serve import PolicyAPI, RewardAPI
from serve.parts import ChatBody, ChatSpec
from tests.process_list import gone

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "12+34="}]
START_S = 300.0


class LitServing:
    """A program that runs a LitServer on a free port, which it is given last."""

    def __init__(self, folder: Path, *program: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "server.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(self.port)],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=START_S)
        began = time.monotonic()
        while not self._healthy():
            assert self.process.poll() is None and time.monotonic() < began + START_S, self.log.read_text()
            time.sleep(0.1)
        main = psutil.Process(self.process.pid)
        self.family = [main.pid, *(child.pid for child in main.children(recursive=True))]

    def _healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="any", max_retries=0)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)


@pytest.fixture(scope="module")
def serving(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LitServing]:
    folder = tmp_path_factory.mktemp("litserve")
    started = LitServing(folder, str(ROOT / "examples/server.py"), str(export))
    yield started
    started.end()


def test_parts_answer_on_the_event_loop_of_a_litserve_worker(export: Path) -> None:
    asked = {"messages": MESSAGES, "seed": 1, "max_tokens": 8, "model": "tiny"}

    async def answers(api: PolicyAPI, request: Any) -> list[Any]:
        return [part async for part in api.encode_response(api.predict(await api.decode_request(request)))]

    async def both(spec: PolicyAPI, own: PolicyAPI) -> tuple[list[Any], list[Any]]:
        first, *_ = await asyncio.gather(*(answers(spec, ChatBody(**asked)) for _ in range(3)))
        assert all(parts == first for parts in _)  # drawn together in one batch
        parts = [{"type": "text", "text": "1+1=", "lang": "en"}]
        for told, message in {"tempature": {}, "mood": {"mood": "x"}, "lang": {"content": parts}}.items():
            typo = {"tempature": 1} if told == "tempature" else {}
            with pytest.raises(HTTPException, match=told):
                await answers(spec, ChatBody(**{**asked, **typo, "messages": [{**MESSAGES[0], **message}]}))
        return first, await answers(own, asked)

    by_spec, by_us = PolicyAPI(export, max_completions=2), PolicyAPI(export, spec=None)
    for policy in (by_spec, by_us):
        app = litserve.LitServer([policy, RewardAPI(export)], accelerator="cpu").app  # LitServe looks at the signatures
        assert {"/v1/chat/completions", "/v1/score"} <= {route.path for route in app.routes}
    for api in (by_spec, by_us):
        api.setup("cpu")
    chunks, (whole,) = asyncio.run(both(by_spec, by_us))
    told = json.loads(whole)
    assert "".join(chunk["content"] for chunk in chunks) == told["choices"][0]["message"]["content"]
    assert {name: chunks[-1][name] for name in told["usage"]} == told["usage"]
    assert told["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_the_openai_client_gets_the_same_answer_whole_and_streamed(serving: LitServing) -> None:
    client, asked = serving.openai(), {"messages": MESSAGES, "seed": 1, "max_tokens": 8}
    whole = client.chat.completions.create(model="tiny", **asked)
    text, chunks = "", list(client.chat.completions.create(model="tiny", stream=True, **asked))
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
    assert len(chunks) > 3  # as tokens are drawn
    assert text == whole.choices[0].message.content and text.startswith("<think>")
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    assert chunks[-1].usage == whole.usage


def test_a_null_n_is_one_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    async def counted(self: Any, request: ChatBody, background_tasks: Any) -> Any:
        return list(range(request.n))  # as LitServe's does first

    monkeypatch.setattr(litserve.OpenAISpec, "chat_completion", counted)
    body = ChatBody(messages=MESSAGES, n=None)
    assert asyncio.run(ChatSpec.chat_completion(object.__new__(ChatSpec), body, BackgroundTasks())) == [0]


@pytest.mark.slow
def test_a_request_that_litserve_would_answer_wrongly_is_refused(serving: LitServing) -> None:
    bad: dict[str, dict[str, Any]] = {
        "n": {"n": 2, "stream": True},
        "n: give 1": {"n": 0},
        "n: LitServe": {"n": 2, "seed": 1},
        "logprobs": {"logprobs": True},
        "tempature": {"tempature": 1},
        "messages.0.mood": {"messages": [{**MESSAGES[0], "mood": "x"}]},
        "max_tokens": {"max_tokens": 10**6},
    }
    for told, fields in bad.items():
        answer = serving.http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert answer.status_code == 400 and answer.json()["detail"].startswith(told)
    null = serving.http.post("/v1/chat/completions", json={"messages": MESSAGES, "n": None, "max_tokens": 2})
    assert null.status_code == 200 and len(null.json()["choices"]) == 1
    with pytest.raises(openai.APIError, match="max_tokens"):
        list(serving.openai().chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**6, stream=True))


@pytest.mark.slow
def test_a_score_request_is_answered_as_by_the_whole_server(serving: LitServing) -> None:
    items = [{"completion": rf"\boxed{{{n}}}", "answer": "46"} for n in (46, 5)]
    answer = serving.http.post("/v1/score", json={"items": items})
    assert [(item["value"], item["status"]) for item in answer.json()["items"]] == [(1.0, "ok"), (0.0, "wrong")]
    assert serving.http.post("/v1/score", json={"items": [{"completion": ""}]}).status_code == 422
    assert serving.http.post("/v1/score", json={"items": items, "model": "other"}).status_code == 404


@pytest.mark.slow
def test_sigterm_leaves_no_process(serving: LitServing) -> None:
    assert serving.end() == 0
    assert all(gone(pid, 10.0) for pid in serving.family)


@pytest.mark.slow
def test_two_workers_draw_the_same_in_the_format_of_the_whole_server(export: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import signal, sys, litserve\n"
        "from serve import PolicyAPI, RewardAPI\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "    parts = [PolicyAPI(sys.argv[1], spec=None), RewardAPI(sys.argv[1])]\n"
        "    server = litserve.LitServer(parts, workers_per_device=2)\n"
        "    server.run('127.0.0.1', int(sys.argv[2]), num_api_servers=1, generate_client_file=False)\n"
    )
    serving = LitServing(tmp_path, str(tmp_path / "own.py"), str(export))
    asked = {"messages": MESSAGES, "seed": 1, "n": 3, "max_tokens": 8, "logprobs": True}
    answers = [serving.http.post("/v1/chat/completions", json=asked).json() for _ in range(8)]
    for answer in answers:
        assert answer["choices"] == answers[0]["choices"] and answer["usage"] == answers[0]["usage"]
    assert len({choice["message"]["content"] for choice in answers[0]["choices"]}) == 3
    assert all(len(choice["logprobs"]["content"]) == 8 for choice in answers[0]["choices"])
    texts = ["", "", ""]
    for chunk in serving.openai().chat.completions.create(model="tiny", stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice["message"]["content"] for choice in answers[0]["choices"]]
    refused = serving.http.post("/v1/chat/completions", json={**asked, "n": 0})
    assert refused.json()["error"]["param"] == "n"
    streamed = serving.http.post("/v1/chat/completions", json={**asked, "n": 0, "stream": True}).text
    assert json.loads(streamed.removeprefix("data: "))["error"]["param"] == "n"
    assert serving.end() == 0


@pytest.mark.parametrize("limits", [{"max_queue": 0}, {"deadline": -1.0}, {"deadline": float("nan")}], ids=str)
def test_senseless_limits_are_refused_at_once(export: Path, limits: dict[str, Any]) -> None:
    for part in (PolicyAPI, RewardAPI):
        with pytest.raises(ValueError, match=rf"^{part.__name__} needs .*{next(iter(limits))}.*, got"):
            part(export, **limits)
    with pytest.raises(ValueError, match=r"^PolicyAPI needs max_completions >= 1, got 0\.$"):
        PolicyAPI(export, max_completions=0)


def test_a_folder_without_a_model_is_refused_at_once(tmp_path: Path) -> None:
    for part in (PolicyAPI, RewardAPI):
        with pytest.raises(ValueError, match="nothing"):
            part(tmp_path / "nothing")
