"""Bodies are refused before anything is built from them, and strings never count as structure."""

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import field_validator

from serve.errors import ApiError, install_handlers
from serve.fields import Body
from serve.json_body import MAX_DEPTH, MAX_ELEMENTS, JsonRoute, parse_object
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest
from tests.serve.bodies import parse

MANY = MAX_ELEMENTS


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"1," * MANY + b"1]}",
        b'{"a":[' + b"[]," * MANY + b"1]}",
        b'{"a":[' + b"{}," * MANY + b"1]}",
        b"{" + b'"a":0,' * MANY + b'"a":0}',
        b'{"a":[' + b'"",' * MANY + b'""]}',
        b'{"a":[' + b'"\\\\",' * MANY + b'""]}',
        b'{"a":' + b"[" * MANY,
        b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"a":' + b'[{"b":' * 500 + b"1" + b"}]" * 500 + b"}",
        ('{"a":[' + "1," * MANY + "1]}").encode("utf-16"),
    ],
    ids=["numbers", "lists", "objects", "keys", "strings", "escapes", "open", "deep", "mixed", "utf-16"],
)
def test_what_would_be_costly_is_refused_before_it_is_built(body: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.status == 400
    assert caught.value.code in ("body_too_complex", "invalid_json")
    assert peak < 4 * len(body) + (1 << 20)


@pytest.mark.parametrize(
    "value",
    [
        {"a": ",:[{]}" * MANY},
        {"a": '\\"[' * 1000, "[" * 200: '\\\\"'},
        {"a": [[1] * 1000] * 100},
        {"a": "\ud800"},
        {"a": 1e308, "b": -5, "c": 10**600},
    ],
)
def test_honest_bodies_are_read_whatever_their_strings_hold(value: Any) -> None:
    assert parse_object(json.dumps(value).encode()) == value


def test_nesting_has_one_limit_in_every_mixture() -> None:
    levels = MAX_DEPTH - 1  # and the object around them
    for left, right in (("[", "]"), ('{"b":', "}")):
        body = f'{{"a":{left * levels}1{right * levels}}}'
        parse_object(body.encode())
        with pytest.raises(ApiError, match="levels"):
            parse_object(body.replace("1", f"{left}1{right}").encode())


@pytest.mark.parametrize(
    "body", [b'{"a": 1e400}', b'{"a": -1e999}', b'{"a": Infinity}', b'{"a": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_what_json_cannot_say_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "stop": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}] * 2000}),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": dict.fromkeys(map(str, range(2000)))},
        ),
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": [[1.5] * 1000] * 100}),
        (EvaluateRequest, {"items": [1] * 1000}),
        (EvaluateRequest, {"items": [{"problem": "1", "answer": "1", **{f"k{i}": 0 for i in range(100)}}]}),
    ],
)
def test_a_list_has_one_fault_not_one_per_element(kind: Any, value: Any) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        kind.model_validate(value)
    assert caught.value.error_count() <= 5  # one for each kind that a field may be
    with pytest.raises(ApiError):
        parse(kind, json.dumps(value).encode())


@pytest.mark.parametrize("number", [b"9" * 641, b"-" + b"9" * 641, b"9" * 100_000, b"0." + b"9" * 9 + b"e999999"])
@pytest.mark.parametrize("body", [b'{"n":%s}', b'{"a":[{"b":[1,%s]}]}', b"[%s]", b"%s"])
def test_a_number_that_is_too_long_is_named_in_the_words_of_json(body: bytes, number: bytes) -> None:
    with pytest.raises(ApiError, match=r"an integer has more than 640 digits|no finite 64-bit number") as caught:
        parse_object(body % number)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "sys." not in caught.value.message
    assert parse_object(b'{"n":-%s}' % (b"9" * 640)) == {"n": 1 - 10**640}


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(ApiError, match="the body is not in UTF-8, see byte 6"):
        parse_object(b'{"a":"\xff"}')


class Told(Body):
    """A body that notes which thread reads it."""

    numbers: list[int]

    @field_validator("numbers")
    @classmethod
    def _note(cls, value: list[int]) -> list[int]:
        readers.append(threading.current_thread())
        return value


readers: list[threading.Thread] = []


def test_a_large_body_is_read_beside_the_event_loop_with_the_same_answers() -> None:
    app = FastAPI()
    app.router.route_class = JsonRoute
    install_handlers(app)

    @app.post("/sum")
    async def add(body: Told) -> int:
        return sum(body.numbers)

    async def scenario(body: dict[str, Any]) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/sum", json=body)

    for padding, beside in (0, False), (10_000, True):
        readers.clear()
        answer = asyncio.run(scenario({"numbers": [1, 2] + [0] * padding}))
        assert (answer.status_code, answer.json()) == (200, 3)
        assert [thread is not threading.main_thread() for thread in readers] == [beside]
        wrong = asyncio.run(scenario({"numbers": ["1"] + [0] * padding}))
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "numbers.0"
        unknown = asyncio.run(scenario({"numbers": [0] * padding, "n": 1}))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_parameter")
