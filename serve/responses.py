"""``/v1/responses``: OpenAI's newer API for text, on top of the chat route. No response is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field, ValidationError

from grpo_pl.rollout.native.continuous import ScoredToken
from serve import fields
from serve.answers import Choice, usage_of
from serve.bodies import Body, Text
from serve.completions import CompletionRoutes
from serve.errors import ApiError, from_fault, to_json
from serve.messages import Message
from serve.schemas import Asked, ChatRequest, Seed, StreamOptions
from serve.settings import MAX_ITEMS


class TextFormat(Body):
    """The form of the answer."""

    passing = fields.JSON_SCHEMA
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")

    def response_format(self) -> dict[str, Any]:
        """The ``response_format`` of a chat that means the same."""
        schema = {} if self.json_schema is None else {"json_schema": {"schema": self.json_schema}}
        return {"type": self.type, **schema}


class TextOptions(Body):
    """Options of the answer's text."""

    passing = fields.Passing({"verbosity": ("medium",)})
    format: TextFormat | None = None


class ResponsesRequest(Asked):
    """``POST /v1/responses``."""

    passing = fields.RESPONSES
    input: Text | Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
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

    def chat(self) -> ChatRequest:
        """The chat request that means the same.

        Raises:
            ValidationError: a value that chat refuses.
        """
        messages = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if self.instructions is not None:
            messages = [Message(role="system", content=self.instructions), *messages]
        same = {name: getattr(self, name) for name in ("temperature", "top_p", "seed", "stream", "model")}
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
            return await self._completions.answer_chat(chat, request, ResponseShape(body, chat, self._model))
        except ValidationError as error:
            raise _renamed(from_fault(error.errors(include_url=False, include_input=False)[0])) from None
        except ApiError as error:
            raise _renamed(error) from None


class ResponseShape:
    """One response, whole or as events; a ``Shape``."""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, model: str) -> None:
        self._body, self._chat, self._model = body, chat, model
        self._id, self._item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._events = int(time.time()), 0

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        status = "incomplete" if choice.finish == "length" else "completed"
        return self._response(status, [self._message(choice.stream.text, status)], usage_of(choices, 1))

    def opening(self, choice: Choice) -> str:
        empty = self._response("in_progress", [], None)
        item = {**self._message("", "in_progress"), "content": []}
        events = [
            self._event("response.created", response=empty),
            self._event("response.in_progress", response=empty),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place(), part=_part("")),
            self._delta(choice.stream.prefix),
        ]
        return "".join(events)

    def chunk(self, choice: Choice, text: str, tokens: Sequence[ScoredToken], choices: Sequence[Choice]) -> str:
        return self._delta(text)

    def closing(self, choices: Sequence[Choice]) -> str:
        whole, text = self.whole(choices), choices[0].stream.text
        events = [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(f"response.{whole['status']}", response=whole),
        ]
        return "".join(events)

    def failure(self, error: ApiError) -> str:
        """The last event of a failed stream; ``error``, besides OpenAI's own fields, makes its client raise."""
        told = error.body()["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"], error=told)

    def _delta(self, text: str) -> str:
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[]) if text else ""

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> str:
        value = {"type": kind, "sequence_number": self._events, **content}
        self._events += 1
        return f"event: {kind}\ndata: {to_json(value)}\n\n"

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_part(text)],
        }

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
            "output": list(output),
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": chosen.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._chat.top_p,
            "truncation": "disabled",
            "usage": told,
            "user": extra.get("user"),
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
