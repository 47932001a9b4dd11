"""Requests that no honest client sends: an answer in one shape, and a server that stays."""

import base64
import json
import socket
from typing import Any

import openai
import pytest

from tests.serve.bodies import CHAT, COMPLETIONS, EVALUATE, HELLO, SCORE
from tests.serve.conftest import error_of

ROUTES = [("POST", CHAT), ("POST", COMPLETIONS), ("POST", SCORE), ("POST", EVALUATE)] + [
    ("GET", path) for path in ("/", "/ready", "/metrics", "/v1/models", "/info", "/nothing")
]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, SCORE, EVALUATE])
def test_malformed_json_is_400(server: Any, path: str, body: bytes) -> None:
    assert server.refusal(path, body)["code"] == "invalid_json"


def test_an_empty_question_is_a_prompt(server: Any) -> None:
    server.ask(CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 1})  # the template's prefill is left


@pytest.mark.parametrize("text", ["π=", "1+1=\N{ZERO WIDTH SPACE}", "\U0001f600", "\0"])
def test_characters_that_the_tokenizer_does_not_know_are_named(server: Any, text: str) -> None:
    items = [{"problem": text, "answer": "2"}]
    asked = {CHAT: {"messages": [{"role": "user", "content": text}]}, COMPLETIONS: {"prompt": text}}
    for path, body in {**asked, EVALUATE: {"items": items}}.items():
        assert server.refusal(path, body)["code"] == "unknown_character"


def test_a_prompt_longer_than_the_context_is_400(server: Any) -> None:
    for length in (4096, 1_000_000):
        error = server.refusal(CHAT, {"messages": [{"role": "user", "content": "1" * length}]})
        assert error["code"] == "context_length_exceeded"
    error = server.refusal(COMPLETIONS, {"prompt": "1" * 4000, "max_tokens": 200})
    assert error["code"] == "context_length_exceeded"


def test_a_body_of_100_megabytes_is_413(server: Any) -> None:
    size = 100 << 20
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
    answer = server.exchange(head + b"x" * size)
    assert answer.startswith(b"HTTP/1.1 413")
    assert error_of((413, json.loads(answer.partition(b"\r\n\r\n")[2])), 413)["code"] == "body_too_large"


def test_a_chunked_body_counts_as_well(server: Any) -> None:
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    answer = server.exchange(
        f"POST {SCORE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + 9 * chunk
        + b"0\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 413")


def test_half_a_request_then_hanging_up_leaves_nothing_behind(server: Any) -> None:
    for request in (b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"GET /rea"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request)
    assert server.call("GET", "/ready")[0] == 200
    assert server.is_idle()


def test_unknown_routes_and_methods_have_the_same_shape(server: Any) -> None:
    error_of(server.call("GET", "/v1/nothing")[:2], 404)
    error_of(server.call("GET", CHAT)[:2], 405)
    for gone in ("/v1/responses", "/v1/weights", "/login", "/predict"):
        server.refusal(gone, {}, 404)
    server.refusal("/health", {}, 405)
    for path, status in (("/health", 405), ("/v1/nothing", 404), (CHAT, 415)):
        bare = server.exchange(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert bare.startswith(f"HTTP/1.1 {status}".encode()), bare


def test_an_unknown_model_is_404(server: Any) -> None:
    error = server.refusal(CHAT, {"model": "gpt-5", "messages": HELLO}, 404)
    assert error["param"] == "model"
    assert "tiny" in error["message"]


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI, crowded: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="n: "):
        client.chat.completions.create(model="tiny", messages=HELLO, n=0)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    stranger = openai.OpenAI(base_url=f"{crowded.address}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="tiny", messages=HELLO)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_health_asks_for_the_key(crowded: Any, method: str, path: str) -> None:
    bad = [
        "Bearer wrong",
        "Bearer secret-12",
        "Bearer secret-",
        "Basic !!",
        "Basic bWU6c2VjcmV0",
        "Basic bWU=",
        "secret-1",
    ]
    for header in ["", "X-API-Key: secret-1\r\n", *(f"Authorization: {value}\r\n" for value in bad)]:
        request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n"
        answer = crowded.exchange(request.encode())
        assert answer.startswith(b"HTTP/1.1 401"), answer
        assert b"www-authenticate" in answer.lower()
    assert crowded.call(method, path, {} if method == "POST" else None)[0] not in (401, 500)


def test_the_key_may_be_the_password_of_http_basic(crowded: Any) -> None:
    """As a browser asks for it when the page is opened."""
    opened = crowded.exchange(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n")
    assert opened.startswith(b"HTTP/1.1 401") and b"www-authenticate: Basic" in opened
    given = "Authorization: Basic " + base64.b64encode(b"me:secret-1").decode()
    head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{given}\r\n\r\n"
    assert crowded.exchange(head.encode()).startswith(b"HTTP/1.1 200")


def test_health_is_open_to_everyone(crowded: Any) -> None:
    for host in ("127.0.0.1", "10.0.0.7:8000", "probe.example"):
        answer = crowded.exchange(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200"), answer
