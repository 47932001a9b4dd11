"""OpenAI's client for Python, of versions 2 and 3."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.clients
openai = pytest.importorskip("openai")

PROBLEM: Any = [{"role": "user", "content": "12+34="}]
PICK: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"number": {"enum": [1, 2, 3]}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}


class Sum(BaseModel):
    sign: Literal["+", "-"]
    right: bool


@pytest.fixture
def client(base_url: str, key: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60.0)


def test_a_chat_is_answered_and_counted(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=PROBLEM, max_tokens=12, temperature=0.5, seed=3)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_a_stream_has_the_text_of_the_whole_answer_and_its_usage_last(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": PROBLEM, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(piece.usage is None for piece in pieces)


def test_the_helper_for_streams_fills_a_pydantic_model(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": PROBLEM, "response_format": Sum, "seed": 3, "max_tokens": 100}
    with client.chat.completions.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert len(texts) > 1 and "".join(texts) == final.content
    assert final.parsed == Sum.model_validate_json(final.content)


def test_a_seed_determines_all_n_answers(client: Any) -> None:
    first, again, other = (
        [c.message.content for c in client.chat.completions.create(
            model="tiny", messages=PROBLEM, n=4, seed=seed, max_tokens=20).choices]
        for seed in (7, 7, 8)
    )  # fmt: skip
    assert first == again != other
    assert len(set(first)) == 4


def test_a_stop_ends_the_answer_before_it(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": PROBLEM, "seed": 3, "max_tokens": 30}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert text.startswith(cut.message.content + stop)
    assert cut.finish_reason == "stop"


def test_log_probabilities_belong_to_the_tokens_of_the_text(client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=PROBLEM, seed=3, max_tokens=8, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    tokens = choice.logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert choice.message.content.endswith("".join(token.token for token in tokens))  # behind the prefill
    for token in tokens:
        assert token.logprob <= 0.0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.logprob - 1e-6


def test_a_tool_is_called_and_its_result_answered(client: Any) -> None:
    asked: Any = {"model": "tiny", "tools": [PICK], "parallel_tool_calls": False, "max_tokens": 200, "seed": 3}
    called = client.chat.completions.create(messages=PROBLEM, tool_choice="required", **asked).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "pick" and call.function.arguments in [f'{{"number": {i}}}' for i in (1, 2, 3)]
    messages = [*PROBLEM, called.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    assert client.chat.completions.create(messages=messages, **asked).choices[0].message.role == "assistant"


def test_a_streamed_call_of_a_tool_can_be_put_together(client: Any) -> None:
    choice: Any = {"type": "function", "function": {"name": "pick"}}
    with client.chat.completions.stream(
        model="tiny", messages=PROBLEM, tools=[PICK], tool_choice=choice, parallel_tool_calls=False, max_tokens=200
    ) as stream:
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls
    assert (call.function.name, final.finish_reason) == ("pick", "tool_calls")


def test_a_pydantic_model_as_response_format_is_filled(client: Any) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=PROBLEM, response_format=Sum, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Sum)


def test_a_text_is_completed_with_log_probabilities(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=["1+1=", "2+2="], n=2, max_tokens=5, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(("1+1=", "2+2=")) for choice in answer.choices)
    assert all(len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) for choice in answer.choices)


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "grpo_pl"


@pytest.mark.parametrize("chats", [1, 8])
def test_the_asynchronous_client_gets_the_same_answers(client: Any, base_url: str, key: str, chats: int) -> None:
    asked: Any = {"model": "tiny", "messages": PROBLEM, "max_tokens": 20}

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as other:
            tasks = [other.chat.completions.create(**asked, seed=seed) for seed in range(chats)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*tasks)]

    expected = [client.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in range(chats)]
    assert asyncio.run(ask()) == expected


@pytest.mark.parametrize(
    ("change", "error", "code", "param"),
    [
        ({"model": "other"}, "NotFoundError", "model_not_found", "model"),
        ({"temperature": -1}, "BadRequestError", "invalid_value", "temperature"),
        ({"messages": []}, "BadRequestError", None, "messages"),
        ({"extra_body": {"temprature": 1}}, "BadRequestError", None, "temprature"),
        ({"extra_headers": {"Authorization": "Bearer wrong"}}, "AuthenticationError", "invalid_api_key", None),
    ],
)
def test_errors_are_of_the_classes_of_the_client(
    client: Any, change: dict[str, Any], error: str, code: str | None, param: str | None
) -> None:
    with pytest.raises(getattr(openai, error)) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": PROBLEM, "max_tokens": 2} | change)
    assert refused.value.param == param
    assert code in (None, refused.value.code)
    assert refused.value.message and refused.value.request_id


def test_a_route_that_is_not_there_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="tiny", input="12+34=")
    assert refused.value.code == "route_not_found"


def test_a_full_server_raises_and_a_client_that_retries_waits_for_room(
    client: Any, full: tuple[str, Callable[[], None]]
) -> None:
    address, make_room = full
    asked: Any = {"model": "tiny", "messages": PROBLEM, "max_tokens": 2}
    with pytest.raises(openai.RateLimitError) as refused:
        client.with_options(base_url=address).chat.completions.create(**asked)
    assert refused.value.code == "queue_full" and int(refused.value.response.headers["retry-after"]) >= 1
    threading.Timer(0.5, make_room).start()
    patient = client.with_options(base_url=address, max_retries=8)
    assert patient.chat.completions.create(**asked).usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_runs_out_of_time_leaves_no_work_behind(
    client: Any, wait_until_idle: Callable[[], None], stream: bool
) -> None:
    long: Any = {"model": "tiny", "messages": PROBLEM, "n": 64, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    if stream:
        pieces = client.chat.completions.create(**long, stream=True)
        assert [next(pieces).object for _ in range(3)] == ["chat.completion.chunk"] * 3
        pieces.close()
    else:
        began = time.monotonic()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(**long)
        assert time.monotonic() - began < 5.0
    wait_until_idle()


def test_a_cancelled_task_of_the_asynchronous_client_leaves_no_work_behind(
    base_url: str, key: str, wait_until_idle: Callable[[], None]
) -> None:
    long: Any = {"model": "tiny", "messages": PROBLEM, "n": 64, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            task = asyncio.create_task(client.chat.completions.create(**long))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    wait_until_idle()
