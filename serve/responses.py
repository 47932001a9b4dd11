"""``/v1/responses``: OpenAI's newer API for text and functions, on top of the chat route. No response is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Discriminator, Field, Tag, ValidationError

from grpo_pl.openai_format import fields
from grpo_pl.openai_format.answers import MadeCall
from grpo_pl.openai_format.fields import MAX_ITEMS, MAX_TOOLS, Body, Short, Text, by_type
from grpo_pl.openai_format.messages import (
    ContentPart,
    FunctionSchema,
    FunctionTool,
    Message,
    StreamOptions,
    TextOrParts,
    ToolChoice,
    joined,
)
from grpo_pl.rollout.native.continuous import ScoredToken
from serve.answers import Choice, usage_of
from serve.completions import CompletionRoutes
from serve.errors import ApiError, from_fault, to_json
from serve.schemas import BaseRequest, ChatRequest, Seed


class TextFormat(Body):
    """The form of the answer."""

    ignored = fields.JSON_SCHEMA
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")

    def response_format(self) -> dict[str, Any]:
        """The ``response_format`` of a chat that means the same."""
        schema = {} if self.json_schema is None else {"json_schema": {"schema": self.json_schema}}
        return {"type": self.type, **schema}


class TextOptions(Body):
    """Options of the answer's text."""

    ignored = fields.IgnoredFields({"verbosity": ("medium",)})
    format: TextFormat | None = None


class FunctionCall(Body):
    """A call in an earlier answer."""

    ignored = fields.RESPONSE_ITEM
    type: Literal["function_call"]
    call_id: Short
    name: Text
    arguments: Text


class ResultPart(ContentPart):
    """A piece of a result."""

    type: Literal["input_text"]


class FunctionResult(Body):
    """The result of a call."""

    ignored = fields.RESPONSE_ITEM
    type: Literal["function_call_output"]
    call_id: Short
    output: TextOrParts[ResultPart]


class ResponseTool(FunctionSchema):
    """A function that an answer may call."""

    type: Literal["function"]


class ChosenTool(Body):
    """The one function that an answer has to call."""

    type: Literal["function"]
    name: Text


def _kind(item: Any) -> str:
    """The member of the union below that an item is read as; no identifier, which errors would take for a field."""
    kinds = {"function_call": "a call", "function_call_output": "a result"}
    return kinds.get(str(item.get("type")), "a message") if isinstance(item, dict) else "a message"


_Item = Annotated[
    Annotated[Message, Tag("a message")]
    | Annotated[FunctionCall, Tag("a call")]
    | Annotated[FunctionResult, Tag("a result")],
    Discriminator(_kind),
]


def _as_messages(items: Sequence[Message | FunctionCall | FunctionResult]) -> list[dict[str, Any]]:
    """The input as messages of a chat; calls belong to the assistant's message before them, or between them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, FunctionResult):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
        elif isinstance(item, FunctionCall):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1]["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
        elif item.role == "assistant" and messages and messages[-1].get("tool_calls"):
            messages[-1]["content"] += item.text
        else:
            messages.append({"role": item.role, "content": item.text, "tool_calls": []})
    return messages


class ResponsesRequest(BaseRequest):
    """``POST /v1/responses``."""

    ignored = fields.RESPONSES
    input: Annotated[
        Annotated[Text, Tag("a text")]
        | Annotated[list[_Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("a list")],
        by_type("a text, or a list of messages, calls and results", {str: "a text", list: "a list"}),
    ]
    instructions: Text | None = None
    """Replaces the template's system text."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Most tokens of the answer; by default that of training."""
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = None
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[ResponseTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    """Functions that an answer may call."""
    tool_choice: ToolChoice[ChosenTool] = "auto"
    """When an answer calls functions: never, as the model decides, always, or always this one."""
    parallel_tool_calls: bool = True
    """Let an answer hold several calls; else it ends with the first."""

    def chat(self) -> ChatRequest:
        """The chat request that means the same.

        Raises:
            ValidationError: a value that chat refuses.
        """
        items = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = _as_messages(items)
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        same = {name: getattr(self, name) for name in ("temperature", "top_p", "seed", "stream", "model")}
        same |= {"parallel_tool_calls": self.parallel_tool_calls, "tool_choice": self.tool_choice}
        same["tools"] = [FunctionTool(type="function", function=tool) for tool in self.tools]
        if isinstance(self.tool_choice, ChosenTool):
            same["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text is not None and self.text.format is not None:
            same["response_format"] = self.text.format.response_format()
        return ChatRequest.model_validate({**same, "messages": messages, "max_tokens": self.max_output_tokens})


class ResponsesRoute:
    """Answers through the chat route, with one completion in the format of a response."""

    def __init__(self, completions: CompletionRoutes, model: str) -> None:
        self._completions, self._model = completions, model

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        try:
            chat = body.chat()
            job = await self._completions.chat_job(chat, ResponsesFormat(body, chat, self._model))
            return await self._completions.answer(request, job)
        except ValidationError as error:
            raise _renamed(from_fault(error.errors(include_url=False, include_input=False)[0])) from None
        except ApiError as error:
            raise _renamed(error) from None


class ResponsesFormat:
    """One response, whole or as events; an ``AnswerFormat``."""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, model: str) -> None:
        self._body, self._chat, self._model = body, chat, model
        self.system_fingerprint = ""
        self._id, self._item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._events = int(time.time()), 0
        self._items = 0  # of a stream, so far
        self._message_index: int | None = None  # of the message among them

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        status = "incomplete" if choice.finish == "length" else "completed"
        items = list(map(_call, choice.calls))
        if choice.text or not items:
            items.insert(choice.text_after, self._message(choice.text, status))
        return self._response(status, items, usage_of(choices, 1))

    def opening(self, choice: Choice) -> str:
        empty = self._response("in_progress", [], None)
        begun = self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)
        has_text = choice.opening or choice.reader is None  # else it may have calls and no text
        return begun + (self._text(choice.opening) if has_text else "")

    def chunk(self, choice: Choice, text: str, tokens: Sequence[ScoredToken], choices: Sequence[Choice]) -> str:
        calls = [_call(call) for _, call in choice.new_calls()]
        first = max(0, choice.text_after - self._items) if text and self._message_index is None else 0
        said = [*map(self._called, calls[:first]), self._text(text) if text else "", *map(self._called, calls[first:])]
        return "".join(said)

    def closing(self, choices: Sequence[Choice]) -> str:
        (choice,) = choices
        events = "" if self._message_index is not None or choice.calls else self._text("")
        whole = self.whole(choices)
        if (at := self._message_index) is not None:
            events += self._event("response.output_text.done", **self._place(), text=choice.text, logprobs=[])
            events += self._event("response.content_part.done", **self._place(), part=_part(choice.text))
            events += self._event("response.output_item.done", output_index=at, item=whole["output"][at])
        return events + self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: ApiError) -> str:
        """The last event of a failed stream; ``error``, besides OpenAI's own fields, makes its client raise."""
        told = error.body()["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"], error=told)

    def _text(self, text: str) -> str:
        """The events for more text of the message; the first ones also begin it."""
        events = ""
        if self._message_index is None:
            self._message_index, self._items = self._items, self._items + 1
            item = {**self._message("", "in_progress"), "content": []}
            events += self._event("response.output_item.added", output_index=self._message_index, item=item)
            events += self._event("response.content_part.added", **self._place(), part=_part(""))
        if text:
            events += self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])
        return events

    def _called(self, item: dict[str, Any]) -> str:
        """The events for one whole call."""
        at, arguments = self._items, item["arguments"]
        self._items += 1
        place, begun = {"item_id": item["id"], "output_index": at}, {**item, "arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=at, item=begun)
        events += self._event("response.function_call_arguments.delta", **place, delta=arguments)
        events += self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        return events + self._event("response.output_item.done", output_index=at, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": self._message_index, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> str:
        value = {"type": kind, "sequence_number": self._events, **content}
        self._events += 1
        return f"event: {kind}\ndata: {to_json(value)}\n\n"

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = [_part(text)]
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: Sequence[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        body, extra = self._body, self._body.model_extra or {}
        told = None
        if usage is not None:
            told = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        chosen = (body.text and body.text.format) or TextFormat.model_validate({"type": "text"})
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": extra.get("metadata") or {},
            "model": self._model,
            "system_fingerprint": self.system_fingerprint,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": chosen.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [tool.model_dump(by_alias=True, exclude={"returns"}) for tool in body.tools],
            "top_p": self._chat.top_p,
            "truncation": "disabled",
            "usage": told,
            "user": extra.get("user"),
        }


def _call(call: MadeCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id.removeprefix('call_')}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _renamed(refusal: ApiError) -> ApiError:
    """A refusal by the chat route, with the names of fields of ``/v1/responses``."""
    names = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
    for name, own in names.items():
        if refusal.param is not None and refusal.param.startswith(name):
            refusal.message = refusal.message.replace(name, own, 1)
            refusal.param = refusal.param.replace(name, own, 1)
    return refusal
