"""JSON of requests and answers, large ones beside the event loop, and work of many requests on it in turns."""

import asyncio
import json
import threading
import time
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import field_validator

from grpo_pl.openai_format.fields import Body
from serve.errors import ApiError, install_handlers, to_json
from serve.large_json import Encoded, JsonRoute, encoded, large_json_response
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest
from serve.streaming import TimeSlices
from tests.serve.bodies import on_a_loop, parse


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


ROW = {"token": 'é\ud800"\\', "logprob": -0.5, "top": [[1, -1e-9], [2, None]], "none": [], "nothing": {}}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "x",
        [ROW],
        list(range(64)),
        list(range(65)),
        list(range(1000)),
        [ROW] * 200,
        {"a": [ROW] * 64, "b": [ROW] * 65, 'c"': {"d": list(range(129)), "e": True}},
        [list(range(100)), [], list(range(3)), {"x": [list(range(70)) for _ in range(70)]}],
        [[[[ROW] * 65]]],
    ],
    ids=lambda value: to_json(value)[:20],
)
def test_an_answer_in_pieces_is_the_one_at_once(value: Any) -> None:
    response = asyncio.run(large_json_response(lambda: value))
    assert response.body.decode() == to_json(value)
    assert json.loads(response.body) == value
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")


def test_what_has_no_json_is_raised() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        asyncio.run(large_json_response(lambda: [*range(100), float("nan")]))


def test_what_is_json_already_is_left_as_it_is() -> None:
    value = {"a": Encoded(["[", "1,2", "]"]), "b": [{"c": Encoded(['"x"'])}, 3], "d": {}}
    assert encoded(value) == '{"a":[1,2],"b":[{"c":"x"},3],"d":{}}'


def _slowly(item: int) -> int:
    time.sleep(0.002)
    return -item


def test_the_event_loop_runs_others_between_the_items_of_many_requests() -> None:
    async def scenario() -> tuple[list[list[int]], float]:
        slices, longest, began = TimeSlices(), 0.0, time.monotonic()
        work = asyncio.gather(*(slices.map(_slowly, range(10 * i, 10 * i + 10)) for i in range(40)))
        while not work.done():
            before = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - before)
        assert time.monotonic() - began >= 0.8  # the sum of all work
        return await work, longest

    results, longest = asyncio.run(scenario())
    assert results == [[-item for item in range(10 * i, 10 * i + 10)] for i in range(40)]
    assert longest < 0.1  # one slice at a time; one of each request would be 0.2


@on_a_loop
async def test_a_request_that_fails_lets_the_next_one_pass() -> None:
    slices = TimeSlices()
    with pytest.raises(ZeroDivisionError):
        await slices.map(lambda item: 1 // item, [1, 0])
    assert await slices.map(lambda item: 1 // item, [1]) == [1]
    assert await slices.map(lambda item: item, []) == []
