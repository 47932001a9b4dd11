"""The images of a row, in its columns and in the parts of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_pl.data.cells import content_text, conversation_in, is_conversation, is_text
from grpo_pl.data.image_limits import IMAGE_COLUMNS, ImageLimits, OptionLimits
from grpo_pl.extras.images.picture import Picture, read_picture
from grpo_pl.types import Conversation, Message


class _Images:
    """Reads the images of one row, in order."""

    def __init__(self, row: Mapping[str, Any], folder: Path | None, limits: ImageLimits) -> None:
        self.folder, self.limits = folder, limits
        self.column = _of_columns(row)
        self.taken = 0
        self.read: list[Picture] = []

    def add(self, given: Any) -> None:
        if len(self.read) == self.limits.per_prompt:
            raise ValueError(f"more than {self.limits.per_prompt} images: {self.limits.setting('per_prompt')}.")
        where = f"image {len(self.read) + 1}"
        self.read.append(read_picture(given, folder=self.folder, limits=self.limits, where=where))

    def add_next(self) -> None:
        """The next one of the columns."""
        if self.taken == len(self.column):
            raise ValueError(f"its messages have more parts of type image than there are images, {self.taken}.")
        self.taken += 1
        self.add(self.column[self.taken - 1])


def read_images(
    row: Mapping[str, Any], asked: Any, *, folder: Path | None, limits: ImageLimits
) -> tuple[Conversation | None, tuple[Picture, ...]]:
    """The messages of a row with ``{"type": "image"}`` in the place of each image, and the images in that order.

    Messages may hold an image themselves, as ``{"type": "image", "image": …}`` or OpenAI's ``image_url``, or take the
    next one of the columns ``image`` and ``images``. Messages without such parts have the images of the columns at the
    beginning of the user's first turn.

    Args:
        asked: the row's question: a text, for which the messages are None, or a conversation.
        folder: see `read_picture`.

    Raises:
        ValueError: one line: an image that cannot be read, or messages and images that do not fit together.
    """
    images = _Images(row, folder, limits)
    messages: Conversation | None = None
    if is_conversation(asked):
        messages = tuple(_with_parts(message, images) for message in conversation_in(asked, parts=True))
        placed = any(isinstance(m["content"], list) and _places(m["content"]) for m in messages)
        if not placed and images.column:
            first = next(number for number, message in enumerate(messages) if message["role"] == "user")
            marks = [{"type": "image"} for _ in images.column]
            content = messages[first]["content"]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            whole = {**messages[first], "content": [*marks, *parts]}
            messages = (*messages[:first], whole, *messages[first + 1 :])
        if placed and images.taken < len(images.column):
            there = len(images.column)
            raise ValueError(f"its messages have places for {images.taken} of the {there} images of its columns.")
    while images.taken < len(images.column):
        images.add_next()
    return messages, tuple(images.read)


def row_with_images(row: Mapping[str, Any], question: str, *, file: Path, number: int, option: str) -> dict[str, Any]:
    """A row of a file with its images in the column ``images``, and with their places in the messages of its column
    ``question``.

    Args:
        option: what messages name as that which has the images read.

    Raises:
        ValueError: as `read_images`, by the number of the row, counted from 1.
    """
    try:
        messages, read = read_images(row, row.get(question), folder=file.parent, limits=OptionLimits(option=option))
    except ValueError as error:
        raise ValueError(f"row {number} of {str(file)!r}: {error}") from error
    kept = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
    return {**kept, **({} if messages is None else {question: list(messages)}), "images": read}


def _of_columns(row: Mapping[str, Any]) -> list[Any]:
    """What the columns hold: any of them may be missing, null or empty."""
    cells = [row.get(name) for name in IMAGE_COLUMNS]
    found = [cell for cell in cells if cell is not None and not (isinstance(cell, str | list | tuple) and not cell)]
    if len(found) > 1:
        raise ValueError("it has both image and images: leave one of them out.")
    return [given for cell in found for given in (cell if isinstance(cell, list | tuple) else [cell])]


def _places(parts: list[Message]) -> bool:
    return any(part["type"] == "image" for part in parts)


def _with_parts(message: Message, images: _Images) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [_part(part, message["role"], images) for part in content]
    if not _places(parts) and not is_text(content_text(parts)):
        raise ValueError(f"a message of the {message['role']} holds neither text nor image.")
    return {**message, "content": parts}


def _part(part: Any, role: str, images: _Images) -> Message:
    given = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = given.pop("type", None)
    if kind == "text" and given.keys() == {"text"} and isinstance(given["text"], str):
        return {"type": "text", "text": given["text"]}
    if kind in ("image", "image_url") and role != "user":
        raise ValueError(f"a message of the {role} holds an image: only the user's may.")
    if kind == "image" and not given:
        images.add_next()
    elif kind == "image" and given.keys() == {"image"}:
        images.add(given["image"])
    elif kind == "image_url" and given.keys() == {"image_url"}:
        url = given["image_url"]
        images.add(url.get("url") if isinstance(url, Mapping) else url)
    else:
        raise ValueError(
            f"a part of a message is {str(part)[:60]!r}: write {{'type': 'text', 'text': …}}, {{'type': 'image'}} for "
            "the next image of the columns, {'type': 'image', 'image': …} or an image_url."
        )
    return {"type": "image"}
