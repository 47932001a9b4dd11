"""Instructor, which asks OpenAI's client for objects of pydantic models."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.clients
instructor = pytest.importorskip("instructor")

import openai  # noqa: E402 - which it brings

ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 200, "seed": 3}


class Sum(BaseModel):
    """A sum."""

    model_config = ConfigDict(extra="forbid")  # else a policy with random weights adds further fields
    sign: Literal["+", "-"]
    right: bool


@pytest.fixture
def client(base_url: str, key: str) -> Callable[..., Any]:
    """``client(mode, **changes)``"""

    def make(mode: str, **changes: Any) -> Any:
        given = {"base_url": base_url, "api_key": key, "max_retries": 0}
        return instructor.from_openai(openai.OpenAI(**given | changes), mode=instructor.Mode[mode])

    return make


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_object_of_the_class_comes_with_the_answer(client: Callable[..., Any], mode: str) -> None:
    told, answer = client(mode).chat.completions.create_with_completion(
        **ASKED, response_model=Sum, parallel_tool_calls=False if mode == "TOOLS" else None
    )
    assert isinstance(told, Sum) and answer.usage.completion_tokens > 0


def test_a_stream_fills_the_object(client: Callable[..., Any]) -> None:
    parts = list(client("JSON_SCHEMA").chat.completions.create_partial(**ASKED, response_model=Sum))
    assert len(parts) > 1 and parts[0].right is None
    assert parts[-1].sign in ("+", "-") and parts[-1].right in (False, True)


def test_an_answer_that_does_not_fit_is_asked_for_again(client: Callable[..., Any]) -> None:
    """The whole conversation, with the answer and the reason, is sent back."""
    asked: list[int] = []

    class Never(Sum):
        def model_post_init(self, _: Any) -> None:
            asked.append(1)
            raise ValueError("never")

    with pytest.raises(Exception, match="never") as failed:
        client("JSON_SCHEMA").chat.completions.create(**ASKED, response_model=Never, max_retries=2)
    assert type(failed.value).__name__ == "InstructorRetryException"
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, "NotFoundError"),
        ({"temperature": -1}, "BadRequestError"),
        ({"extra_headers": {"Authorization": "Bearer wrong"}}, "AuthenticationError"),
        ({"timeout": 0.3, "n": 64, "max_tokens": 3000, "extra_body": {"min_tokens": 2999}}, "APITimeoutError"),
    ],
)
def test_errors_are_those_of_openai(
    client: Callable[..., Any], wait_until_idle: Callable[[], None], change: dict[str, Any], error: str
) -> None:
    with pytest.raises(Exception) as refused:
        client("TOOLS").chat.completions.create(**ASKED | change, response_model=str, max_retries=0)
    assert type(refused.value.__cause__ or refused.value).__name__ == error
    wait_until_idle()
