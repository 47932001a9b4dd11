"""LlamaIndex' client for servers like OpenAI's."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
openai_like = pytest.importorskip("llama_index.llms.openai_like")

import openai  # noqa: E402 - which it brings
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

PROBLEM = [ChatMessage(role="user", content="12+34=")]
LONG = {"max_tokens": 3000, "additional_kwargs": {"n": 64, "extra_body": {"ignore_eos": True}}}


class Sum(BaseModel):
    """A sum."""

    model_config = ConfigDict(extra="forbid")  # else a policy with random weights adds further fields
    sign: Literal["+", "-"]
    right: bool


def pick(number: Literal[1, 2, 3]) -> int:
    """Picks a number."""
    return number


@pytest.fixture
def model(base_url: str, key: str) -> Callable[..., Any]:
    """``model(**changes)``"""

    def make(**changes: Any) -> Any:
        given = {"api_base": base_url, "api_key": key, "model": "tiny", "max_tokens": 200, "max_retries": 0}
        kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
        return openai_like.OpenAILike(**given | kind | changes)

    return make


def test_a_chat_is_answered_and_counted(model: Callable[..., Any]) -> None:
    answer = model().chat(PROBLEM, seed=3)
    assert answer.message.content and answer.raw.usage.completion_tokens > 0


def test_a_stream_has_the_text_of_the_whole_answer(model: Callable[..., Any]) -> None:
    whole = model().chat(PROBLEM, seed=3).message.content
    assert "".join(piece.delta for piece in model().stream_chat(PROBLEM, seed=3)) == whole

    async def ask() -> str:
        return "".join([piece.delta async for piece in await model().astream_chat(PROBLEM, seed=3)])

    assert asyncio.run(ask()) == whole


def test_a_text_is_completed(model: Callable[..., Any]) -> None:
    other = model(is_chat_model=False, max_tokens=20)
    whole = other.complete("12+34=", seed=3).text
    assert "".join(piece.delta for piece in other.stream_complete("12+34=", seed=3)) == whole


def test_a_stop_ends_the_answer_before_it(model: Callable[..., Any]) -> None:
    text = model().chat(PROBLEM, seed=3).message.content
    stop = text[len(text) // 2 :][:2]
    assert text.startswith(model().chat(PROBLEM, seed=3, stop=[stop]).message.content + stop)


def test_log_probabilities_come_with_the_answer(model: Callable[..., Any]) -> None:
    answer = model(logprobs=True, top_logprobs=2, max_tokens=5).chat(PROBLEM)
    assert len(answer.logprobs) == answer.raw.usage.completion_tokens
    assert all(len(likeliest) == 2 and likeliest[0].logprob <= 0.0 for likeliest in answer.logprobs)


def test_a_tool_is_called(model: Callable[..., Any]) -> None:
    tool = FunctionTool.from_defaults(pick)
    asked = {"user_msg": "12+34=", "tool_required": True, "allow_parallel_tool_calls": False, "strict": True, "seed": 3}
    answer = model().chat_with_tools([tool], **asked)
    (call,) = model().get_tool_calls_from_response(answer)
    assert call.tool_name == "pick" and call.tool_kwargs["number"] in (1, 2, 3)


@pytest.mark.parametrize("by", ["schema", "tool"])
def test_structured_output_is_an_object_of_the_class(model: Callable[..., Any], by: str) -> None:
    structured = model(should_use_structured_outputs=by == "schema").as_structured_llm(Sum)
    assert isinstance(structured.chat(PROBLEM).raw, Sum)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, "NotFoundError"),
        ({"additional_kwargs": {"top_p": 2}}, "BadRequestError"),
        ({"api_key": "wrong"}, "AuthenticationError"),
        ({"timeout": 0.3, **LONG}, "APITimeoutError"),
    ],
)
def test_errors_are_those_of_openai(
    model: Callable[..., Any], wait_until_idle: Callable[[], None], change: dict[str, Any], error: str
) -> None:
    with pytest.raises(getattr(openai, error)):
        model(**change).chat(PROBLEM)
    wait_until_idle()


def test_a_full_server_raises(model: Callable[..., Any], full: tuple[str, Callable[[], None]]) -> None:
    with pytest.raises(openai.RateLimitError):
        model(api_base=full[0]).chat(PROBLEM)


def test_a_stream_that_is_left_leaves_no_work_behind(
    model: Callable[..., Any], wait_until_idle: Callable[[], None]
) -> None:
    stream = model(**LONG).stream_chat(PROBLEM)
    next(stream)
    stream.close()
    del stream
    gc.collect()  # until then it keeps the connection
    wait_until_idle()
