"""Faults that servers before this one had: each is asked for once."""

import contextlib
import json
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_pl.openai_format.messages import Message
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.texts import TextStream
from serve import conversations
from serve.errors import ApiError
from serve.follow import NewWeights
from serve.prompts import Prompts
from serve.worker import served_model
from tests.serve.bodies import CHAT, COMPLETIONS, HELLO, SCORE, on_a_loop, post, read_all

SOON_S = 2.0
"""0.2 s on a machine of its own."""


def _health(server: Any) -> float:
    began = time.monotonic()
    assert server.call("GET", "/health")[0] == 200
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "1+" * 4000}] * 1000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [f"{i}+1=" for i in range(256)], "max_tokens": 4}),
        (COMPLETIONS, {"prompt": "1+" * 1_000_000, "max_tokens": 1}),
        (SCORE, {"items": [{"completion": "\\boxed{" * 100_000 + "1" + "}" * 100_000, "answer": "1"}]}),
    ],
    ids=["1,000 messages of 8 kB", "256 prompts", "a prompt of 2 MB", "nested boxes"],
)
def test_health_answers_beside_large_requests(server: Any, path: str, body: dict[str, Any]) -> None:
    connections = [server.send(path, body) for _ in range(6)]
    waited = [_health(server) for _ in range(20)]
    for connection in connections:
        assert read_all(connection).startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
    assert max(waited) < SOON_S


@on_a_loop
async def test_a_prompt_beyond_the_context_costs_little_whatever_its_length(export: Path) -> None:
    prompts = Prompts(find_model(export))
    prompts.model.__dict__["context"] = 1 << 17
    text = "1+" * 1_000_000
    cpu, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ApiError, match="more than 131072 tokens"):
        await prompts.from_raw(text)
    assert time.process_time() - cpu < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300 * 1024


def test_weights_that_are_not_finite_are_refused_by_name(export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(export, tmp_path / "export"))
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[3]
    weights[name].view(-1)[1] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name.rpartition('.')[0]}.* not finite"):
        NewWeights.load(find_model(folder), "cpu")


def test_loaded_weights_stay_as_they_are_whatever_becomes_of_their_file(export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(export, tmp_path / "export"))
    policy = NewWeights.load(find_model(folder), "cpu").policy
    before = [parameter.clone() for parameter in policy.parameters()]
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
        file.truncate(100)  # what is mapped beyond would end the process
    assert all(map(torch.equal, before, policy.parameters()))


def test_a_checkpoint_that_has_changed_since_it_was_sealed_is_not_served(run: Path) -> None:
    path = run / "checkpoints" / "rollout-000010.ckpt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for named in (path, run / "checkpoints" / "last.ckpt", run):
        with pytest.raises(ValueError, match="has changed since it was written"):
            served_model(named, trust_rewards=False)


@on_a_loop
async def test_a_chat_template_that_loops_is_given_up(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_TEMPLATE_S", 0.3)
    model = find_model(export)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    model.tokenizer.chat_template = loop + "{{ messages[0].content }}"
    began = time.monotonic()
    with pytest.raises(ApiError, match="takes more than"):
        await Prompts(model).from_messages([Message(role="user", content="1")])
    assert time.monotonic() - began < 10.0


def test_halves_of_characters_are_held_back_up_to_a_point() -> None:
    class Bytes:
        """A tokenizer of bytes, which counts what it decodes."""

        decoded = 0

        def decode(self, tokens: list[int], **_: Any) -> str:
            self.decoded += len(tokens)
            return bytes(tokens).decode(errors="replace")

    tokenizer = Bytes()
    stream = TextStream(tokenizer)  # type: ignore[arg-type]
    for _ in range(2000):
        stream.push([0x9F])  # never the end of a character
    assert tokenizer.decoded < 2000 * 50
    whole = TextStream(Bytes())  # type: ignore[arg-type]
    sent = [whole.push([byte]) for byte in "a€😀b".encode()]
    assert "".join(sent) + whole.finish() == "a€😀b" and "\N{REPLACEMENT CHARACTER}" not in "".join(sent)


def test_a_stream_to_http_1_0_comes_whole_and_without_chunks(server: Any) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(post(CHAT, body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, told = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head.lower()
    assert told.startswith(b"data: {") and told.endswith(b"data: [DONE]\n\n")


def test_the_proxy_of_the_docs_passes_streams_on_and_limits_what_the_server_does_not(
    start: Callable[..., Any], server: Any, tmp_path: Path
) -> None:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx here")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = page.partition("```nginx\n")[2].partition("```")[0]
    config = config.replace("listen 8080", f"listen 127.0.0.1:{port}").replace(
        "127.0.0.1:8000", f"127.0.0.1:{server.port}"
    )
    paths = " ".join(
        f"{kind}_temp_path {tmp_path / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = config.replace("http {", f"http {{ access_log off; {paths}")
    (tmp_path / "nginx.conf").write_text(f"daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'log'};\n{config}")
    process = subprocess.Popen(
        [nginx, "-p", str(tmp_path), "-e", str(tmp_path / "log"), "-c", str(tmp_path / "nginx.conf")]
    )
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        stream = json.dumps({"messages": HELLO, "max_tokens": 4, "stream": True}).encode()
        for body, expected in ((stream, b"200"), (b"x" * (9 << 20), b"413")):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                with contextlib.suppress(OSError):  # nginx does not read on
                    connection.sendall(post(CHAT, body))
                answer = read_all(connection)
            assert answer.split()[1] == expected
            assert expected != b"200" or b"[DONE]" in answer
    finally:
        process.terminate()
        process.wait(20)
