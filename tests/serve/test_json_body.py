"""Bodies that the routes read: one fault for a list, and large ones beside the event loop."""

import asyncio
import json
import threading
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import field_validator

from grpo_pl.openai_format.fields import Body
from serve.errors import ApiError, install_handlers
from serve.json_body import JsonRoute
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest
from tests.serve.bodies import parse


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
