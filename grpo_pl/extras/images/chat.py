"""``encode_chat``: messages with images, as a client of the server sends them, as the prompt that training makes of
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.extras.images.picture import Picture, read_picture
from grpo_pl.openai_format.messages import Message
from grpo_pl.policy.inputs import EncodedPrompt, reader_of
from grpo_pl.policy.trained import ServedModel


@dataclass(frozen=True, kw_only=True)
class _ServedLimits(ImageLimits):
    def setting(self, name: str) -> str:
        return f"the server's limit of {name}"


LIMITS = _ServedLimits()
"""What is refused before an image is decoded."""


Fault = Callable[[str, str], Exception]
"""Makes the error about a field of a request."""


def encode_chat(
    messages: Sequence[Message],
    tools: Sequence[object],
    model: ServedModel,
    *,
    prefill: bool,
    limit: Callable[[], AbstractContextManager[None]],
    fault: Fault,
) -> EncodedPrompt:
    """The prompt of a conversation with images, as rows with these messages have it in training.

    Consecutive messages of one role are joined. Images are decoded one after the other, and none is kept.

    Args:
        prefill: begin the answer with the template's prefill.
        limit: makes a context manager around the chat template, which may be a stranger's.
        fault: what is raised where the policy reads text, there are tools, an image cannot be read or is beyond the
            limits, or the template or the processor do not take the conversation.
    """
    tokenizer, template = model.tokenizer, model.template
    if (reader := reader_of(tokenizer)) is None:
        place, message = next((i, message) for i, message in enumerate(messages) if message.images)
        raise fault(f"messages.{place}.content.{min(message.images)}.image_url", "this model reads text alone.")
    if tools:
        raise fault("tools", "a chat with images has none.")
    pictures = _pictures(messages, fault)
    turns = tuple(
        {"role": role, "content": _content(list(those))}
        for role, those in groupby(messages, lambda m: "system" if m.role == "developer" else m.role)
    )
    template = template if prefill else replace(template, prefill="")
    try:
        with limit():
            text = template.render(turns, tokenizer)
        special = not template.through_chat(tokenizer)
        return reader.encode([text], [{"images": pictures}], add_special_tokens=special)[0]
    except ValueError as error:
        raise fault("messages", str(error)) from error


def _pictures(messages: Sequence[Message], fault: Fault) -> tuple[Picture, ...]:
    found: list[Picture] = []
    for number, message in enumerate(messages):
        for place, url in message.images.items():
            param = f"messages.{number}.content.{place}.image_url.url"
            if len(found) == LIMITS.per_prompt:
                raise fault(param, f"a conversation may have {LIMITS.per_prompt} images.")
            try:
                found.append(read_picture(url, folder=None, limits=LIMITS, where="the image", keep=False))
            except ValueError as error:
                raise fault(param, str(error)) from error
    return tuple(found)


def _content(messages: Sequence[Message]) -> str | list[dict[str, Any]]:
    """A text, or the parts of messages with images, in which no text follows another."""
    parts: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        texts = [message.text] if isinstance(message.content, str) else message.content
        for part in [*(["\n\n"] if number else []), *texts]:
            if not isinstance(part, str) and part.image_url is not None:
                parts.append({"type": "image"})
            elif (text := part if isinstance(part, str) else part.text) and parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            elif text:
                parts.append({"type": "text", "text": text})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
