"""``ImageReader``: a problem with images as the tokens and pixels of its prompt, by the model's own processor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        pictures = columns.get("images") or ()
        if not pictures or not isinstance(asked, str):
            return asked
        return ({"role": "user", "content": [*[{"type": "image"}] * len(pictures), {"type": "text", "text": asked}]},)

    def encode(self, text: str, columns: Mapping[str, Any], *, add_special_tokens: bool) -> EncodedPrompt:
        """The tokens of a rendered prompt, and the pixels of its images.

        Raises:
            ValueError: there are more or fewer images than placeholders, or an image takes too many tokens.
        """
        pictures: tuple[Picture, ...] = tuple(columns.get("images") or ())
        if (places := text.count(PLACEHOLDER)) != len(pictures):
            raise ValueError(
                f"the text of the prompt has {places} places for images, written {PLACEHOLDER}, and the problem "
                f"{len(pictures)} images: give as many of one as of the other."
            )
        if not pictures:
            return EncodedPrompt(list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids))
        batch = self._processed(text, pictures, add_special_tokens=add_special_tokens)
        ids = batch["input_ids"][0].tolist()
        if self._image_tokens(ids) > self.most_tokens:
            self._check_each(pictures)
        key = hashlib.sha256("".join(picture.sha256 for picture in pictures).encode()).hexdigest()
        tensors = {name: tensor for name, tensor in batch.items() if name not in _OF_TEXT}
        return EncodedPrompt(ids, PromptInputs(key=key, tensors=tensors))

    def save_pretrained(self, folder: Any) -> None:
        """Writes the processor with the tokenizer."""
        self.processor.save_pretrained(folder)

    def _processed(self, text: str, pictures: tuple[Picture, ...], *, add_special_tokens: bool) -> Any:
        images = [picture.pil() for picture in pictures]
        return self.processor(images=images, text=[text], add_special_tokens=add_special_tokens, return_tensors="pt")

    def _image_tokens(self, ids: list[int]) -> int:
        return ids.count(self.processor.image_token_id)

    def _check_each(self, pictures: tuple[Picture, ...]) -> None:
        for picture in pictures:
            ids = self._processed(PLACEHOLDER, (picture,), add_special_tokens=False)["input_ids"][0].tolist()
            if (tokens := self._image_tokens(ids)) > self.most_tokens:
                raise ValueError(
                    f"an image of {picture.width}x{picture.height} takes {tokens} tokens, and "
                    f"policy.max_image_tokens is {self.most_tokens}: raise it, or give a smaller image."
                )
