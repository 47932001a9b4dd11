"""Answers of chat in OpenAI's format, whole and as the chunks of a stream, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

DONE = "data: [DONE]\n\n"
"""The last event of a stream."""
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    **dict.fromkeys((501, 505), "invalid_request_error"),
}


class MadeCall(NamedTuple):
    """A call of a tool in an answer."""

    id: str
    name: str
    arguments: str
    """A JSON object."""

    def message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def head(name: str, *, id: str, created: int, model: str, fingerprint: str) -> dict[str, Any]:
    """The fields with which an answer or a chunk begins; ``name`` is its ``object``."""
    return {"id": id, "object": name, "created": created, "model": model, "system_fingerprint": fingerprint}


def assistant_message(text: str, calls: Sequence[MadeCall] = ()) -> dict[str, Any]:
    """The message of an answer; beside calls an empty text is null."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    return message | {"content": text or None, "tool_calls": [call.message() for call in calls]} if calls else message


def delta(text: str, calls: Sequence[tuple[int, MadeCall]] = ()) -> dict[str, Any]:
    """What a chunk adds to the message: text, and calls with their numbers in the answer."""
    made = [{"index": i, **call.message()} for i, call in calls]
    return ({"content": text} if text else {}) | ({"tool_calls": made} if made else {})


def usage(prompt: int, completion: int) -> dict[str, int]:
    """OpenAI's ``usage``: tokens of the prompts and of the completions, end tokens included."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(json_text: str) -> str:
    """One server-sent event."""
    return f"data: {json_text}\n\n"


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer with a status of 400 or more."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
