"""LiteLLM, which translates one interface into those of many providers."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
litellm = pytest.importorskip("litellm")

PICK = {
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
    """A sum."""

    model_config = ConfigDict(extra="forbid")  # else a policy with random weights adds further fields
    sign: Literal["+", "-"]
    right: bool


@pytest.fixture
def ask(base_url: str, key: str) -> Callable[..., Any]:
    """``ask(**changes)``"""

    def complete(function: Callable[..., Any] = litellm.completion, **changes: Any) -> Any:
        given = {
            "model": "openai/tiny",
            "api_base": base_url,
            "api_key": key,
            "max_tokens": 200,
            "max_retries": 0,
            "seed": 3,
        }
        return function(**given | {"messages": [{"role": "user", "content": "12+34="}]} | changes)

    return complete


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "litellm_proxy"])
def test_a_chat_is_answered_with_a_seed_and_n(ask: Callable[..., Any], provider: str) -> None:
    first, again = (ask(model=f"{provider}/tiny", n=2, temperature=0.9) for _ in range(2))
    assert len(first.choices) == 2 and first.choices[0].message.content != first.choices[1].message.content
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


def test_options_of_vllm_are_handed_on(ask: Callable[..., Any]) -> None:
    answers = [ask(model="hosted_vllm/tiny", top_k=1, seed=seed, max_tokens=20) for seed in (1, 2)]
    assert answers[0].choices[0].message == answers[1].choices[0].message


def test_a_stream_ends_with_its_usage(ask: Callable[..., Any]) -> None:
    pieces = list(ask(stream=True, max_tokens=20, stream_options={"include_usage": True}))
    whole = ask(max_tokens=20)
    assert len(pieces) > 3
    assert litellm.stream_chunk_builder(pieces).choices[0].message.content == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_ends_the_answer_before_it(ask: Callable[..., Any]) -> None:
    text = ask(max_tokens=20).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = ask(max_tokens=20, stop=[stop]).choices[0]
    assert text.startswith(cut.message.content + stop) and cut.finish_reason == "stop"


def test_log_probabilities_come_with_the_answer(ask: Callable[..., Any]) -> None:
    answer = ask(logprobs=True, top_logprobs=2, max_tokens=5)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert all(token.logprob <= 0.0 and len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}], ids=str)
def test_a_tool_is_called(ask: Callable[..., Any], choice: Any) -> None:
    answer = ask(tools=[PICK], tool_choice=choice, parallel_tool_calls=False).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, answer.finish_reason) == ("pick", "tool_calls")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_pydantic_model_as_response_format_fits_the_answer(ask: Callable[..., Any], provider: str) -> None:
    answer = ask(model=f"{provider}/tiny", response_format=Sum)
    Sum.model_validate_json(answer.choices[0].message.content)


def test_a_text_is_completed(base_url: str, key: str) -> None:
    model = "text-completion-openai/tiny"
    answer = litellm.text_completion(model=model, prompt="1+1=", api_base=base_url, api_key=key, max_tokens=4)
    assert 0 < answer.usage.completion_tokens <= 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "openai/other"}, "NotFoundError"),
        ({"temperature": -1}, "BadRequestError"),
        ({"api_key": "wrong"}, "AuthenticationError"),
        ({"timeout": 0.3, "n": 64, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}, "Timeout"),
    ],
)
def test_errors_are_of_the_classes_of_the_client(
    ask: Callable[..., Any], wait_until_idle: Callable[[], None], change: dict[str, Any], error: str
) -> None:
    with pytest.raises(getattr(litellm.exceptions, error)):
        ask(**change)
    wait_until_idle()


def test_a_full_server_raises_and_a_client_that_retries_waits_for_room(
    ask: Callable[..., Any], full: tuple[str, Callable[[], None]]
) -> None:
    address, make_room = full
    with pytest.raises(litellm.exceptions.RateLimitError):
        ask(api_base=address)
    make_room()
    assert ask(api_base=address, num_retries=3).usage.completion_tokens > 0


def test_a_stream_that_is_left_leaves_no_work_behind(
    ask: Callable[..., Any], wait_until_idle: Callable[[], None]
) -> None:
    long: Any = {"stream": True, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}

    async def leave() -> None:
        stream = await ask(litellm.acompletion, **long)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    wait_until_idle()
