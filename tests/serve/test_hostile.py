"""Requests that no honest client sends: an answer in one shape, and a server that stays."""

import json
import socket
from typing import Any

import openai
import pytest

CHAT, COMPLETIONS, SCORE, EVALUATE = "/v1/chat/completions", "/v1/completions", "/v1/score", "/v1/evaluate"
HELLO = [{"role": "user", "content": "1+1="}]
ROUTES = [("POST", CHAT), ("POST", COMPLETIONS), ("POST", SCORE), ("POST", EVALUATE)] + [
    ("GET", path) for path in ("/", "/ready", "/metrics", "/v1/models", "/info", "/docs", "/nothing")
]


def error_of(answer: tuple[int, Any], status: int) -> dict[str, Any]:
    """The error of an answer, whose shape is checked."""
    assert answer[0] == status, answer
    assert set(answer[1]) == {"error"}
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"messages": ', b"\xff\xfe", b"[1]", b"null", b'"text"', b'{"temperature": NaN}',
        b"[" * 100_000, b'{"n": ' + b"9" * 10_000 + b"}",
    ],
    ids=["empty", "open", "cut", "bytes", "list", "null", "string", "nan", "nested", "digits"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, SCORE, EVALUATE])
def test_malformed_json_is_400(server: Any, path: str, body: bytes) -> None:
    assert error_of(server.post(path, body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (COMPLETIONS, {}, "prompt"),
        (SCORE, {}, "items"),
        (SCORE, {"items": [{"completion": "x"}]}, "items.0.answer"),
        (SCORE, {"items": [{"answer": "x"}]}, "items.0.completion"),
        (EVALUATE, {}, "items"),
        (EVALUATE, {"items": [{"problem": "x"}]}, "items.0.answer"),
    ],
)
def test_a_missing_field_is_named(server: Any, path: str, body: Any, param: str) -> None:
    error = error_of(server.post(path, body), 400)
    assert error["param"].startswith(param)
    assert param in error["message"]
    assert error["code"] == "missing_field"


@pytest.mark.parametrize(
    "change",
    [
        *({"n": n} for n in (0, -1, 100_000, 65, 1.5, "2", True)),
        *({"n": n, "stream": True} for n in (0, -1)),
        *({"max_tokens": n} for n in (0, -1, 10**9, 2.5, "3")),
        {"max_tokens": 3, "max_completion_tokens": 4},
        *({"temperature": t} for t in (-1, 1e-30, 1e30, "hot")),
        *({"top_p": p} for p in (0, -0.5, 1.5, 1e-46)),
        {"top_k": -2},
        {"seed": 2**70},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"top_logprobs": 21, "logprobs": True},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "xml"}},
        {"stream": "yes"},
    ],
    ids=json.dumps,
)
def test_a_value_out_of_range_is_400(server: Any, change: dict[str, Any]) -> None:
    error = error_of(server.post(CHAT, {"messages": HELLO, **change}), 400)
    assert any(name in error["message"] for name in change), error


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}],
        [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}],
        "text",
        [17],
    ],
    ids=str,
)
def test_messages_that_make_no_prompt_are_400(server: Any, messages: Any) -> None:
    assert error_of(server.post(CHAT, {"messages": messages}), 400)["param"].startswith("messages")


def test_an_empty_question_is_a_prompt(server: Any) -> None:
    asked = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    assert server.post(CHAT, asked)[0] == 200  # the template's prefill is left


@pytest.mark.parametrize("text", ["π=", "1+1=\N{ZERO WIDTH SPACE}", "\U0001f600", "\0"])
def test_characters_that_the_tokenizer_does_not_know_are_named(server: Any, text: str) -> None:
    error = error_of(server.post(CHAT, {"messages": [{"role": "user", "content": text}]}), 400)
    assert error["code"] == "unknown_character"
    error_of(server.post(COMPLETIONS, {"prompt": text}), 400)
    error_of(server.post(EVALUATE, {"items": [{"problem": text, "answer": "2"}]}), 400)


def test_a_lone_surrogate_in_a_prompt_is_400(server: Any) -> None:
    error_of(server.post(CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400)


@pytest.mark.parametrize("name", [b'"\\ud800"', b"1" * 50])
def test_an_id_that_names_nothing_is_400(server: Any, name: bytes) -> None:
    body = b'{"items": [{"problem": "1+1=", "answer": "2", "id": %s}], "max_tokens": 1}' % name
    assert error_of(server.post(EVALUATE, body), 400)["param"].startswith("items.0.id")


@pytest.mark.parametrize("prompt", [[], [[]], "", [10**6], [-1], [1.5], [["x"]], {"a": 1}, [[1], "x"], ["x"] * 300])
def test_prompts_that_are_none_are_400(server: Any, prompt: Any) -> None:
    assert error_of(server.post(COMPLETIONS, {"prompt": prompt}), 400)["param"].startswith("prompt")


def test_a_prompt_longer_than_the_context_is_400(server: Any) -> None:
    for length in (4096, 1_000_000):
        error = error_of(server.post(CHAT, {"messages": [{"role": "user", "content": "1" * length}]}), 400)
        assert error["code"] == "context_length_exceeded"
    error = error_of(server.post(COMPLETIONS, {"prompt": "1" * 4000, "max_tokens": 200}), 400)
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


def test_garbage_on_the_socket_is_400_and_the_server_goes_on(server: Any) -> None:
    for garbage in (b"\0\1\2\3\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"x" * 200_000 + b"\r\n\r\n"):
        answer = server.exchange(garbage)
        assert answer.startswith(b"HTTP/1.1 4") or answer == b"", answer[:80]
    assert server.call("GET", "/ready")[0] == 200


def test_half_a_request_then_hanging_up_leaves_nothing_behind(server: Any) -> None:
    for request in (b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"GET /rea"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request)
    assert server.call("GET", "/ready")[0] == 200
    assert server.is_idle()


def test_unknown_routes_and_methods_have_the_same_shape(server: Any) -> None:
    error_of(server.call("GET", "/v1/nothing")[:2], 404)
    error_of(server.call("GET", CHAT)[:2], 405)
    error_of(server.call("GET", "/info")[:2], 404)
    error_of(server.post("/health", {}), 405)
    for path, status in (("/health", 405), ("/v1/nothing", 404), (CHAT, 415)):
        bare = server.exchange(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert bare.startswith(f"HTTP/1.1 {status}".encode()), bare


def test_an_unknown_model_is_404(server: Any) -> None:
    error = error_of(server.post(CHAT, {"model": "gpt-5", "messages": HELLO}), 404)
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
    bad = ["Bearer wrong", "Bearer secret-12", "Bearer secret-", "Basic !!", "Basic bWU6c2VjcmV0LTE=", "secret-1"]
    for header in ["", "X-API-Key: secret-1\r\n", *(f"Authorization: {value}\r\n" for value in bad)]:
        request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n"
        answer = crowded.exchange(request.encode())
        assert answer.startswith(b"HTTP/1.1 401"), answer
        assert b"www-authenticate" in answer.lower()
    assert crowded.call(method, path, {} if method == "POST" else None)[0] not in (401, 500)


def test_health_is_open_to_everyone(crowded: Any) -> None:
    for host in ("127.0.0.1", "10.0.0.7:8000", "probe.example"):
        answer = crowded.exchange(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200"), answer
