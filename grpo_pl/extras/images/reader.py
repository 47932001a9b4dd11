"""``ImageReader``: a problem with images as the tokens and pixels of its prompt, by the model's own processor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_pl.extras.images.picture import Picture
from grpo_pl.policy.inputs import EncodedPrompt
from grpo_pl.policy.template import PLACEHOLDER
from grpo_pl.types import Conversation, PromptInputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True, kw_only=True)
class ImageReader:
    """Expands each placeholder once, to as many tokens as its image takes."""

    processor: Any
    """The model's own, of an image processor and the tokenizer."""
    tokenizer: PreTrainedTokenizerBase
    most_tokens: int
    """Most tokens of one image."""

    def asked(self, asked: str | Conversation, columns: Mapping[str, Any]) -> str | Conversation:
        """A question has its images before its text; a conversation has them where its messages say."""
        pictures = _pictures(columns)
        if not pictures or not isinstance(asked, str):
            return asked
        return ({"role": "user", "content": [*[{"type": "image"}] * len(pictures), {"type": "text", "text": asked}]},)

    def encode(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, add_special_tokens: bool
    ) -> list[EncodedPrompt]:
        """The tokens of rendered prompts, and the pixels of their images.

        Prompts with as many images of the same sizes go through the processor together, since a call costs more than a
        small image. Others do not: it would pad them to one another's size.

        Raises:
            ValueError: there are more or fewer images than placeholders, or an image takes too many tokens.
        """
        shown = list(map(_pictures, columns))
        alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number, (text, pictures) in enumerate(zip(texts, shown, strict=True)):
            if (places := text.count(PLACEHOLDER)) != len(pictures):
                raise ValueError(
                    f"the text of the prompt has {places} places for images, written {PLACEHOLDER}, and the problem "
                    f"{len(pictures)} images: give as many of one as of the other."
                )
            alike.setdefault(tuple((each.width, each.height) for each in pictures), []).append(number)
        found: dict[int, EncodedPrompt] = {}
        for numbers in alike.values():
            read = self._read([texts[i] for i in numbers], [shown[i] for i in numbers], add_special_tokens)
            found |= zip(numbers, read, strict=True)
        return [found[number] for number in range(len(texts))]

    def _read(
        self, texts: list[str], shown: Sequence[tuple[Picture, ...]], add_special_tokens: bool
    ) -> list[EncodedPrompt]:
        """Prompts with images of the same sizes, or all without any."""
        if not shown[0]:
            ids = self.tokenizer(texts, add_special_tokens=add_special_tokens).input_ids
            return [EncodedPrompt(list(row)) for row in ids]
        images = [picture.pil() for pictures in shown for picture in pictures]
        batch = self.processor(images=images, text=texts, add_special_tokens=add_special_tokens)
        names = [name for name in batch if name not in _OF_TEXT]
        parts = {name: torch.stack([torch.as_tensor(each) for each in batch[name]]).chunk(len(texts)) for name in names}
        found = []
        for number, (ids, pictures) in enumerate(zip(batch["input_ids"], shown, strict=True)):
            if self._image_tokens(ids) > self.most_tokens:
                self._check_each(pictures)
            key = hashlib.sha256("".join(picture.sha256 for picture in pictures).encode()).hexdigest()
            tensors = {name: part[number].clone() for name, part in parts.items()}
            found.append(EncodedPrompt(list(ids), PromptInputs(key=key, tensors=tensors)))
        return found

    def save_pretrained(self, folder: Any) -> None:
        """Writes the processor with the tokenizer."""
        self.processor.save_pretrained(folder)

    def _image_tokens(self, ids: list[int]) -> int:
        return ids.count(self.processor.image_token_id)

    def _check_each(self, pictures: tuple[Picture, ...]) -> None:
        """Refuses the one that takes too many tokens, if it is one."""
        for picture in pictures:
            (ids,) = self.processor(images=[picture.pil()], text=[PLACEHOLDER])["input_ids"]
            if (tokens := self._image_tokens(ids)) > self.most_tokens:
                raise ValueError(
                    f"an image of {picture.width}x{picture.height} takes {tokens} tokens, and "
                    f"policy.max_image_tokens is {self.most_tokens}: raise it, or give a smaller image."
                )


def _pictures(columns: Mapping[str, Any]) -> tuple[Picture, ...]:
    """The images of a problem; a column of that name that was read as it stands holds none."""
    given = columns.get("images")
    return tuple(each for each in given if isinstance(each, Picture)) if isinstance(given, tuple) else ()
