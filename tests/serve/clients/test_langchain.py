"""LangChain's client for OpenAI's API."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
langchain_openai = pytest.importorskip("langchain_openai")

import openai  # noqa: E402 - which it brings
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402


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
        given = {"base_url": base_url, "api_key": key, "model": "tiny", "max_tokens": 200, "max_retries": 0, "seed": 3}
        return langchain_openai.ChatOpenAI(**given | changes)

    return make


def test_a_chat_is_answered_and_counted(model: Callable[..., Any]) -> None:
    answer = model().invoke([("system", "Add."), ("user", "12+34=")])
    assert answer.content and answer.response_metadata["finish_reason"] in ("stop", "length")
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > usage["input_tokens"] > 0


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(model: Callable[..., Any]) -> None:
    whole = model().invoke("12+34=")
    pieces = list(model(stream_usage=True).stream("12+34="))
    assert len(pieces) > 3
    assert "".join(piece.content for piece in pieces) == whole.content
    assert [piece.usage_metadata for piece in pieces if piece.usage_metadata] == [whole.usage_metadata]


def test_n_answers_and_a_batch_of_chats(model: Callable[..., Any]) -> None:
    (group,) = model(n=3, max_tokens=20).generate([[HumanMessage("12+34=")]]).generations
    assert len({choice.text for choice in group}) == 3
    answers = asyncio.run(model().abatch(["1+1=", "2+2=", "1+1="]))
    assert answers[0].content == answers[2].content != answers[1].content


def test_a_stop_ends_the_answer_before_it(model: Callable[..., Any]) -> None:
    text = model().invoke("12+34=").content
    stop = text[len(text) // 2 :][:2]
    assert text.startswith(model().invoke("12+34=", stop=[stop]).content + stop)


def test_log_probabilities_come_with_the_metadata(model: Callable[..., Any]) -> None:
    answer = model(logprobs=True, top_logprobs=2, max_tokens=5).invoke("12+34=")
    tokens = answer.response_metadata["logprobs"]["content"]
    assert len(tokens) == answer.usage_metadata["output_tokens"]
    assert all(token["logprob"] <= 0.0 and len(token["top_logprobs"]) == 2 for token in tokens)


def test_a_tool_is_called_and_its_result_answered(model: Callable[..., Any]) -> None:
    with_tools = model().bind_tools([pick], tool_choice="pick", parallel_tool_calls=False, strict=True)
    called = with_tools.invoke("12+34=")
    (call,) = called.tool_calls
    assert call["name"] == "pick" and call["args"]["number"] in (1, 2, 3)
    messages = [HumanMessage("12+34="), called, ToolMessage("2", tool_call_id=call["id"])]
    assert model().bind_tools([pick]).invoke(messages).type == "ai"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(model: Callable[..., Any], method: str) -> None:
    assert isinstance(model().with_structured_output(Sum, method=method).invoke("12+34="), Sum)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, "NotFoundError"),
        ({"temperature": -1.0}, "BadRequestError"),
        ({"api_key": "wrong"}, "AuthenticationError"),
        ({"timeout": 0.3, "n": 64, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}, "APITimeoutError"),
    ],
)
def test_errors_are_those_of_openai(
    model: Callable[..., Any], wait_until_idle: Callable[[], None], change: dict[str, Any], error: str
) -> None:
    with pytest.raises(getattr(openai, error)):
        model(**change).invoke("12+34=")
    wait_until_idle()


def test_a_full_server_raises(model: Callable[..., Any], full: tuple[str, Callable[[], None]]) -> None:
    with pytest.raises(openai.RateLimitError):
        model(base_url=full[0]).invoke("12+34=")


def test_a_stream_that_is_left_leaves_no_work_behind(
    model: Callable[..., Any], wait_until_idle: Callable[[], None]
) -> None:
    stream = model(max_tokens=3000, extra_body={"ignore_eos": True}).stream("12+34=")
    next(stream)
    stream.close()
    wait_until_idle()
