"""Messages of a conversation, tools that an answer may call, their calls, and requests for the next message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from grpo_pl.openai_format import fields
from grpo_pl.openai_format.fields import (
    MAX_ITEMS,
    MAX_TOOLS,
    SAMPLING_OF_THE_RUN,
    Body,
    Short,
    StopTexts,
    Text,
    at,
    by_type,
)
from grpo_pl.openai_format.json_text import MalformedJson, parse_object

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
P = TypeVar("P", bound=Body)
TextOrParts = Annotated[
    Annotated[Text, Tag("a text")] | Annotated[list[P], Field(max_length=MAX_ITEMS, fail_fast=True), Tag("a list")],
    by_type("a text or a list of parts", {str: "a text", list: "a list"}),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")] | Annotated[P, Tag("a tool")],
    by_type("none, auto, required, or an object that names a tool", {str: "a word", dict: "a tool", Body: "a tool"}),
]
"""When an answer calls tools; ``P`` names the one that it must call."""


def _readable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's parameters, if its parts have the types on which chat templates and parsers rely.

    Raises:
        ValueError: names the part that has not.
    """
    if schema.get("type", "object") != "object":
        raise ValueError("the type of parameters must be object")
    for where, part in _schemas(schema, "parameters"):
        if not isinstance(part, dict | bool):
            raise ValueError(f"{where} must be a schema")
        if isinstance(part, bool):
            continue
        kinds = part.get("type", [])
        if not all(kind in _TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
            raise ValueError(f"{where}: type must be one of {', '.join(_TYPES)}")
        for name in ("required", "enum"):
            if not isinstance(part.get(name, []), list):
                raise ValueError(f"{where}: {name} must be a list")
        if not all(isinstance(name, str) for name in part.get("required", [])):
            raise ValueError(f"{where}: required must hold names")
    return schema


def _schemas(schema: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(path, schema) of a schema and of all schemas nested in it.

    Raises:
        ValueError: a keyword that must hold an object of schemas holds something else.
    """
    where = where[:200]  # what a name costs must not grow with the number of schemas in it
    yield where, schema
    if not isinstance(schema, dict):
        return
    for name in ("properties", "$defs", "definitions", "patternProperties"):
        inner = schema.get(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{where}: {name} must be an object")
        for key, part in inner.items():
            yield from _schemas(part, f"{where}.{key[:200]}")
    for name in ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalProperties", "not"):
        inner = schema.get(name, [])
        for part in inner if isinstance(inner, list) else [inner]:
            yield from _schemas(part, f"{where}.{name}")


class FunctionSchema(Body):
    """A function as the prompt describes it."""

    name: _Name
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_readable)] | None = None
    """A JSON schema of type object."""
    returns: dict[str, Any] | None = Field(None, alias="return")
    """The type of its result, as in the schemas of transformers."""
    strict: bool = False
    """Accepted; arguments follow the schema only where tool_choice makes the answer call a tool."""

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        try:
            json.dumps([self.parameters, self.returns], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a character cannot be written") from None
        return self


class FunctionTool(Body):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: FunctionSchema

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        given = self.function.model_dump(by_alias=True, include={"name", "description", "parameters", "returns"})
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


class _Named(Body):
    name: _Name


class NamedTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: _Named

    @property
    def name(self) -> str:
        return self.function.name


class CalledFunction(Body):
    """The called function with its arguments."""

    name: _Name
    arguments: Text
    """A JSON object."""


class ToolCall(Body):
    """A call in an earlier message of the assistant."""

    ignored = fields.TOOL_CALL
    id: Short
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        try:
            arguments = parse_object(self.function.arguments.encode(), name="the text")
            json.dumps(arguments, ensure_ascii=False).encode()
        except MalformedJson as error:
            raise at("function.arguments", error.message) from None
        except UnicodeEncodeError:
            raise at("function.arguments", "half a character cannot be written") from None
        self._arguments = arguments
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        return self._arguments

    _arguments: dict[str, Any]


def _data_url(url: str) -> str:
    if url[:5].lower() != "data:":
        raise ValueError(f"{url[:60]!r} is no data: URL, and nothing is fetched: write data:image/png;base64,…")
    return url


class ImageUrl(Body):
    """The image of a part."""

    ignored = fields.IMAGE_URL
    url: Annotated[Text, AfterValidator(_data_url)]
    """A ``data:`` URL in base64."""


class ContentPart(Body):
    """A piece of a message; the later names of texts are those of ``/v1/responses``."""

    ignored = fields.CONTENT_PART
    type: Literal["text", "input_text", "output_text", "image_url"]
    text: Text = ""
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _is_what_it_says(self) -> Self:
        own, other = ("image_url", "text") if self.type == "image_url" else ("text", "image_url")
        if own not in self.model_fields_set:
            raise PydanticCustomError("missing", "Field required", {"field": own})
        if other in self.model_fields_set:
            raise at(other, f"a part of type {self.type} has none")
        return self


def joined(content: str | Sequence[ContentPart]) -> str:
    """The text of a message or a result."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(Body):
    """One turn of a conversation."""

    ignored = fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts[ContentPart] = ""
    """The text; may be left out in an assistant's message with tool_calls."""
    tool_calls: list[ToolCall] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
    """The calls in a message of the assistant."""
    tool_call_id: Short | None = None
    """In a tool's message: the id of the call whose result it holds."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("missing", "Field required", {"field": "content"})
        if self.tool_calls and self.role != "assistant":
            raise at("tool_calls", "only the assistant makes them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise at("tool_call_id", "a tool's message needs it, and no other has one")
        if self.role != "user" and self.images:
            raise at("content", "only the user's messages hold images")
        return self

    @property
    def text(self) -> str:
        return joined(self.content)

    @property
    def images(self) -> dict[int, str]:
        """Place among the parts -> URL of each image."""
        parts = enumerate(() if isinstance(self.content, str) else self.content)
        return {place: part.image_url.url for place, part in parts if part.image_url is not None}


class StreamOptions(Body):
    """Options of a stream."""

    ignored = fields.STREAM_OPTIONS
    include_usage: bool = False
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Add the usage so far to every chunk."""


class Conversing(Body):
    """Messages, and the tools that the answer may call."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    """Functions that an answer may call."""
    tool_choice: ToolChoice[NamedTool] = "auto"
    """When an answer calls tools: never, as the model decides, always, or always the named one."""
    parallel_tool_calls: bool = True
    """Let an answer hold several calls; otherwise it ends with the first."""

    @model_validator(mode="after")
    def _tools_fit(self) -> Self:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise at("tools", f"{max(names, key=names.count)!r} is there twice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            raise at("tool_choice", f"there is no tool {self.tool_choice.name!r} in tools")
        if self.tool_choice == "required" and not names:
            raise at("tool_choice", "required needs tools")
        return self

    @property
    def offered(self) -> list[FunctionTool]:
        """The tools that an answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> list[FunctionTool]:
        """The tools of which an answer must call one; empty if it need not call any."""
        chosen = self.tool_choice
        if isinstance(chosen, NamedTool):
            return [tool for tool in self.tools if tool.name == chosen.name]
        return self.tools if chosen == "required" else []


class AgentRequest(Conversing):
    """A chat request of an agent in training: how tokens are drawn is the run's, except that it may ask for fewer."""

    ignored = fields.AGENT
    model: Text | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: StopTexts = Field([])
    """Up to 16 texts that end the answer and are not part of it."""

    @model_validator(mode="after")
    def _no_images(self) -> Self:
        for place, message in enumerate(self.messages):
            if message.images:
                told = "agents in training send no images"
                raise at(f"messages.{place}.content", told, code="unsupported_parameter")
        return self

    @property
    def length(self) -> int | None:
        """Most tokens of the answer; None if the agent sets no limit."""
        given = [length for length in (self.max_tokens, self.max_completion_tokens) if length is not None]
        return min(given, default=None)

    @property
    def in_vain(self) -> list[str]:
        """What it asks for and does not get."""
        names = [name for name in SAMPLING_OF_THE_RUN if (self.model_extra or {}).get(name) is not None]
        return [*names, *(["tool_choice"] if self.must_call else [])]
