"""What requests may hold, checked field by field; the names are OpenAI's where OpenAI has one."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from serve.errors import bad_request, from_validation
from serve.json_body import parse_object
from serve.settings import MAX_COLUMNS, MAX_ITEMS, MAX_SAMPLES, MAX_TEXT

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields of OpenAI's that this server does not serve, with the values that ask for nothing."""

Text = Annotated[str, Field(strict=True)]
T = TypeVar("T", bound=BaseModel)
_SMALLEST = 2.0**-126  # below it a 32-bit float is zero or nearly so, and no token is left to draw
_First = Field(fail_fast=True)  # one error for a list, not one per element: a body may hold hundreds of thousands
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False


class Sampling(_Body):
    """How completions are drawn; what chat, completions and evaluate share."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    seed: Seed | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float = Field(1.0, ge=_SMALLEST, le=1.0)
    top_k: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_completion_length: int | None = Field(None, ge=1)

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, value: float | None) -> float | None:
        if value is not None and 0.0 < value < 1e-3:
            raise ValueError("between 0 and 0.001 there is nothing to draw from: give 0 for the most likely token")
        return value

    @field_validator("n", "top_p", "top_k", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @model_validator(mode="after")
    def _one_length(self) -> Sampling:
        given = {self.max_tokens, self.max_completion_tokens, self.max_completion_length} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens, max_completion_tokens and max_completion_length differ: give one")
        return self

    @property
    def length(self) -> int | None:
        """Most tokens of a completion, if the client said so."""
        return self.max_tokens or self.max_completion_tokens or self.max_completion_length

    def seed_or_random(self) -> int:
        return secrets.randbits(63) if self.seed is None else self.seed


class _Completions(Sampling):
    model: Text | None = None
    stop: Text | Annotated[list[Text], _First] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    @field_validator("stream", "ignore_eos", mode="before")
    @classmethod
    def _null_is_false(cls, value: Any) -> Any:
        return False if value is None else value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 16 or any(not 1 <= len(stop) <= 256 for stop in stops):
            raise ValueError("give at most 16 strings of 1 to 256 characters")
        return value

    @model_validator(mode="after")
    def _served_fields(self) -> _Completions:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise ValueError(f"{name} is not supported by this server")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ContentPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_ITEMS, fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Completions):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens to report at each position; None reports no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Completions):
    """``POST /v1/completions``: one prompt or several, as text or as tokens."""

    prompt: (
        Text
        | Annotated[list[Text], _First]
        | Annotated[list[int], _First]
        | Annotated[list[Annotated[list[int], _First]], _First]
    )
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Problem(_Body):
    """One problem to evaluate on; further fields are columns for the rewards."""

    problem: Text
    answer: Annotated[Text, Field(max_length=MAX_TEXT)]
    id: int | Text | None = None

    @field_validator("id")
    @classmethod
    def _names_something(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, str) and not _is_unicode(value):
            raise ValueError("the text holds a lone surrogate")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError("give a number of at most 64 bits, or a string")
        return value

    @model_validator(mode="after")
    def _few_columns(self) -> Problem:
        if len(self.model_extra or {}) > MAX_COLUMNS:
            raise ValueError(f"give at most {MAX_COLUMNS} further fields")
        return self


class EvaluateRequest(Sampling):
    """``POST /v1/evaluate``."""

    items: list[Problem] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)


class ScoreRequest:
    """``POST /v1/score``. Checked by hand: completions may hold anything that JSON can, lone surrogates included."""

    def __init__(self, body: dict[str, Any]) -> None:
        items = body.get("items")
        if "items" not in body:
            raise bad_request("items: Field required", param="items", code="missing_field")
        if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
            raise bad_request(f"items: give a list of 1 to {MAX_ITEMS} objects.", param="items")
        group = body.get("group", False)
        if not isinstance(group, bool):
            raise bad_request("group: give true or false.", param="group")
        names: set[str] = set()
        for i, item in enumerate(items):
            self._check(item, f"items.{i}")
            names.update(item)
            if len(names) > MAX_COLUMNS + 2:
                raise bad_request(f"items.{i}: give at most {MAX_COLUMNS} further fields.", param=f"items.{i}")
        self.items: list[dict[str, Any]] = items
        self.group = group

    @staticmethod
    def _check(item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise bad_request(f"{path}: give an object with completion and answer.", param=path)
        for name in ("completion", "answer"):
            if name not in item:
                raise bad_request(f"{path}.{name}: Field required", param=f"{path}.{name}", code="missing_field")
            if not isinstance(item[name], str):
                raise bad_request(f"{path}.{name}: give a string.", param=f"{path}.{name}")
            if len(item[name]) > MAX_TEXT:
                raise bad_request(f"{path}.{name}: give at most {MAX_TEXT:,} characters.", param=f"{path}.{name}")


def parse(kind: type[T], body: bytes) -> T:
    """The request in ``body``.

    Raises:
        ApiError: not JSON, a field missing, or one out of range (400, naming it).
    """
    value = parse_object(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded, which one with half a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
