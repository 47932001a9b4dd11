"""A tokenizer of single characters, built in code, for from-scratch models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
FROM_DATA = "from_data"
"""Value of ``policy.characters`` that stands for ``CHARACTERS`` and all others in the data. As a list of characters it
would be refused, because ``a`` occurs twice."""


def character_tokenizer(tags: Sequence[str] = (), characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character, by default printable ASCII and newline, and one per tag (``<think>`` …).

    Other characters become ``<unk>``. ``decode`` treats tags as ordinary text, so that rewards see them.

    Raises:
        ValueError: no characters, or a character that occurs twice.
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


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token behind a text that somebody else wrote, as if a policy had: EOS, or none where there is no EOS."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def known_characters(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """The characters of a tokenizer of single characters; None for any other tokenizer, which can encode every text."""
    named = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
    single = frozenset(token for token in tokenizer.get_vocab() if token not in named)
    return single if single and all(len(token) == 1 for token in single) else None


def lacking_characters(text: str, known: Set[str], tags: Iterable[str]) -> set[str]:
    """The characters of ``text`` outside ``tags`` that are not ``known``."""
    if set(text) <= known:
        return set()
    for tag in tags:
        text = text.replace(tag, "")
    return set(text) - known


def shown_characters(characters: Iterable[str], most: int = 10) -> str:
    """Characters for a message, at most ``most``, each with its code point because some are invisible."""
    named = [f"{c!r} (U+{ord(c):04X})" for c in characters]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
