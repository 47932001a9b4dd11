"""The bodies of requests, checked field by field; fields have OpenAI's names where OpenAI has one."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    Tag,
    field_validator,
    model_validator,
)

from grpo_pl.evaluation.problems import MAX_COLUMNS, MAX_TEXT, EvalProblem, Seed
from grpo_pl.openai_format import fields
from grpo_pl.openai_format.fields import MAX_ITEMS, MAX_TOOLS, Body, Short, StopTexts, Text, at, by_type, chosen
from grpo_pl.openai_format.messages import Conversing, FunctionTool, Message, StreamOptions
from grpo_pl.rollout.grammars import MAX_GRAMMAR, Grammar
from serve.errors import bad_request
from serve.settings import MAX_SAMPLES, MAX_TOKENS

AnyText = Annotated[InstanceOf[str], Field(max_length=MAX_TEXT)]  # unlike `Text` it may hold lone surrogates
_SMALLEST = 2.0**-126  # smaller 32-bit floats are zero or lose digits, and no token would be left to draw
_FailFast = Field(fail_fast=True)  # one error for a list, not one per element: a body may hold hundreds of thousands
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


def _at_most_1024(value: Any) -> Any:
    """Checked before a dictionary is read, because pydantic reports an error for each of its values."""
    if isinstance(value, dict) and len(value) > 1024:
        raise ValueError(f"give at most 1024 entries, not {len(value)}")
    return value


class BaseRequest(Body):
    """A request with the field that all share."""

    model: Text | None = None
    """The model's name, as listed by `/v1/models`."""


class Sampling(BaseRequest):
    """Sampling parameters, which chat, completions and evaluate share; docs/serving.md says what each means."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    seed: Seed | None = None
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float = Field(1.0, ge=_SMALLEST, le=1.0)
    top_k: Annotated[int, AfterValidator(lambda k: max(k, 0))] = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[_TokenName, Annotated[float, Field(ge=-100.0, le=100.0)]], BeforeValidator(_at_most_1024)
    ] = Field({})
    min_tokens: int = Field(0, ge=0)
    bad_words: list[Short] = Field([], max_length=128, fail_fast=True)
    max_thinking_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_completion_length: int | None = Field(None, ge=1)

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, value: float | None) -> float | None:
        if value is not None and 0.0 < value < 1e-3:
            raise ValueError("between 0 and 0.001 there is nothing to draw from: give 0 for the most likely token")
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = {self.max_tokens, self.max_completion_tokens, self.max_completion_length} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens, max_completion_tokens and max_completion_length differ: give one")
        return self

    @property
    def length(self) -> int | None:
        """Most tokens of a completion; None if the client gives no limit."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_completion_length)
        return next((length for length in given if length is not None), None)

    def seed_or_random(self) -> int:
        return secrets.randbits(63) if self.seed is None else self.seed


class JsonSchema(Body):
    """A schema with its name."""

    ignored = fields.JSON_SCHEMA
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The form that a completion must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise at("json_schema", "give it with type json_schema, and with no other")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.json_schema
        return _grammar("json", schema, "response_format")


class StructuredOutputs(Body):
    """A grammar that a completion must match; exactly one field is given."""

    regex: Text | None = Field(None, min_length=1, max_length=MAX_GRAMMAR)
    json_schema: (
        Annotated[
            Annotated[dict[str, Any], Tag("an object")] | Annotated[Text, Tag("a text")],
            by_type("a schema: an object, or its text", {dict: "an object", str: "a text"}),
        ]
        | None
    ) = Field(None, alias="json")
    json_object: bool = False
    choice: list[Annotated[Text, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=1024, fail_fast=True
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum((self.regex is not None, self.json_schema is not None, self.json_object, self.choice is not None)) != 1:
            raise ValueError("give one of regex, json, json_object and choice")
        return self

    @property
    def grammar(self) -> Grammar:
        if self.regex is not None:
            return Grammar("regex", self.regex, "structured_outputs")
        if self.choice is not None:
            return _grammar("choice", self.choice, "structured_outputs")
        schema = {"type": "object"} if self.json_schema is None else self.json_schema
        return _grammar("json", schema, "structured_outputs")


def _grammar(kind: Literal["json", "choice"], given: dict[str, Any] | list[str] | str, field: str) -> Grammar:
    """The grammar of a schema or of choices, which stood in ``field``."""
    text = given if isinstance(given, str) else json.dumps(given)
    if len(text) > MAX_GRAMMAR:
        what = "a schema" if kind == "json" else "all texts of choice"
        raise bad_request(field, f"{what} may have {MAX_GRAMMAR} characters, and there are {len(text)}.")
    return Grammar(kind, text, field)


class _GenerationRequest(Sampling):
    stop: StopTexts = Field([])
    stop_token_ids: list[TokenId] = Field([], max_length=128, fail_fast=True)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("response_format and structured_outputs: give one")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that completions must match; None for any text."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.grammar


class ChatRequest(_GenerationRequest, Conversing):
    """``POST /v1/chat/completions``."""

    ignored = fields.CHAT
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.offered and self.grammar is not None:
            raise at("tools", "give them without response_format or structured_outputs, or with tool_choice none")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true, too")
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of likely tokens to return at each position; None if no log-probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "a text"
    if not isinstance(value, list):
        return None
    first = {str: "several texts", int: "a list of tokens", list: "several lists of tokens"}
    return first.get(type(value[0])) if value else "several texts"


class CompletionRequest(_GenerationRequest):
    """``POST /v1/completions``: one prompt or several, as text or as tokens."""

    ignored = fields.COMPLETION
    prompt: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[list[Text], _FailFast, Tag("several texts")]
        | Annotated[list[int], _FailFast, Tag("a list of tokens")]
        | Annotated[list[Annotated[list[int], _FailFast]], _FailFast, Tag("several lists of tokens")],
        chosen("a text, a list of texts, a list of token ids, or a list of such lists", _kind_of_prompt),
    ]
    logprobs: int | None = Field(None, ge=0, le=20)
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False

    @model_validator(mode="after")
    def _nothing_only_with_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 draws nothing; give at least 1, or echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class EvaluateRequest(Sampling):
    """``POST /v1/evaluate``."""

    ignored = fields.EVALUATION
    items: list[EvalProblem] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)


class ScoreItem(Body):
    """A completion to score, which may be any JSON string; further fields are columns for the rewards."""

    ignored = None
    completion: AnyText
    answer: AnyText


class ScoreRequest(BaseRequest):
    """``POST /v1/score``."""

    ignored = fields.EVALUATION
    items: list[ScoreItem] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    group: bool = False
    """Treat the items as samples of one problem, and return their advantages."""

    @model_validator(mode="after")
    def _few_columns(self) -> Self:
        if len({name for item in self.items for name in item.model_extra or ()}) > MAX_COLUMNS:
            raise ValueError(f"items: give at most {MAX_COLUMNS} further fields")
        return self


class TokenizeRequest(BaseRequest):
    """``POST /tokenize``: a text, or a conversation as the chat route would render it."""

    ignored = fields.TOKENIZE
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    """With messages: the tools that the prompt describes."""
    add_special_tokens: bool = True
    """With prompt: add the special tokens that the tokenizer puts around a text."""
    return_token_strs: bool = False
    """Return the tokens' texts as well."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give prompt or messages")
        if self.tools and self.messages is None:
            raise at("tools", "give them with messages")
        return self


class DetokenizeRequest(BaseRequest):
    """``POST /detokenize``."""

    ignored = fields.TOKENIZE
    tokens: list[TokenId] = Field(max_length=MAX_TOKENS, fail_fast=True)
