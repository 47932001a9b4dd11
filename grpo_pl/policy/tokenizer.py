"""A tokenizer of single characters, built in code: what a from-scratch model speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


def character_tokenizer(tags: Sequence[str] = (), characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character, by default printable ASCII and newline; each of ``tags`` (``<think>`` …) is one, too.

    Other characters become ``<unk>``. Tags are ordinary text to ``decode``: rewards see them.

    Raises:
        ValueError: no characters, or one of them twice.
    """
    if not characters or len(set(characters)) < len(characters):
        raise ValueError(f"policy.characters must be different characters, at least one, got {characters!r}.")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
