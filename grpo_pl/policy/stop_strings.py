"""Stop strings: texts that end a completion, checked against the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from grpo_pl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class StopStrings:
    """Texts that end a completion, with the tokenizer and prefix that are needed to find them in its tokens."""

    texts: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    prefix: str = ""
    """Prefilled text before a completion; a stop string may begin in it."""

    @classmethod
    def of(cls, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase, prefix: str) -> Self | None:
        """The stop strings of ``sampling``; None if it has none.

        Raises:
            ValueError: one is the name of a special token, which decoding leaves out of the text.
        """
        if not sampling.stop:
            return None
        special = next((text for text in sampling.stop if text in tokenizer.all_special_tokens), None)
        if special is not None:
            number = tokenizer.convert_tokens_to_ids(special)
            raise ValueError(f"sampling.stop: {special!r} is a special token: set stop_token_ids: [{number}] instead.")
        return cls(texts=sampling.stop, tokenizer=tokenizer, prefix=prefix)
