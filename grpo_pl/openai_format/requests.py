"""Fields of a chat request that are about the conversation and its tools, checked together."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Tag, model_validator

from grpo_pl.openai_format import fields
from grpo_pl.openai_format.fields import MAX_ITEMS, MAX_TOOLS, SAMPLING_OF_THE_RUN, Body, Text, at, by_type
from grpo_pl.openai_format.messages import FunctionTool, Message, NamedTool

TOOL_CHOICE = by_type(
    "none, auto, required, or an object that names a tool", {str: "a word", dict: "a tool", Body: "a tool"}
)
"""Reads ``tool_choice``."""


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
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("a word")] | Annotated[NamedTool, Tag("a tool")], TOOL_CHOICE
    ] = "auto"
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
