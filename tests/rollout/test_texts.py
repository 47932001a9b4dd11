"""The text of a completion is the same however many of its tokens are read at once, and read once."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from grpo_pl.rollout.texts import TextStream

WORDS = ["▁a", "▁b", "b", "a", "<0xC3>", "<0xA9>", "▁.", "ab"]
PIECES = ["a", "##b", "b", ".", "##.", "'", "s", "##a"]


def _bytes() -> Tokenizer:
    """Each token is a byte, so that é is two of them and many rows of tokens are no text."""
    made = Tokenizer(models.BPE({character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.decoder = decoders.ByteLevel()
    return made


def _words() -> Tokenizer:
    """As in Llama's: a space belongs to the word behind it, and is lost at the beginning."""
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], byte_fallback=True))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return made


def _pieces() -> Tokenizer:
    """Decoding takes spaces before a full stop away, of which a single token shows nothing."""
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="a"))
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def _tokenizer(make: Callable[[], Tokenizer]) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=make(), clean_up_tokenization_spaces=make is _pieces)
    made.add_special_tokens({"eos_token": "<eos>"})
    return made


STOPS = {_bytes: ["é", "aa", "\n\n", "b"], _words: ["a b", "ab", "é", " b b"], _pieces: ["a.", "b's", "ab", ". ."]}


def _by(size: int, tokenizer: Any, tokens: list[int], **how: Any) -> tuple[list[int], bool, str]:
    stream = TextStream(tokenizer, **how)
    for first in range(0, len(tokens), size):
        stream.push(tokens[first : first + size])
    return stream.tokens, stream.stopped, stream.text


@pytest.mark.parametrize("make", STOPS, ids=lambda make: make.__name__)
def test_many_tokens_at_once_end_where_one_after_the_other_do(make: Callable[[], Tokenizer]) -> None:
    tokenizer, draw, stopped = _tokenizer(make), random.Random(0), 0
    likely = [*range(6), tokenizer.eos_token_id]
    if make is _bytes:
        likely += tokenizer("é\nab", add_special_tokens=False)["input_ids"] * 2
    for _ in range(300):
        tokens = draw.choices(likely, k=40)
        stops = draw.sample(STOPS[make], draw.randint(1, 2))
        how = {"stops": stops, "prefix": draw.choice(["", "a"]), "min_tokens": draw.choice([0, 0, 7])}
        alone = _by(1, tokenizer, tokens, **how)
        stopped += alone[1]
        for size in (3, 16):
            assert _by(size, tokenizer, tokens, **how) == alone
    assert stopped > 100


def test_tokens_without_a_stop_string_are_decoded_at_once() -> None:
    tokenizer, calls = _tokenizer(_bytes), 0

    class Counting:
        clean_up_tokenization_spaces = False
        all_special_ids = tokenizer.all_special_ids

        def decode(self, tokens: list[int], **options: Any) -> str:
            nonlocal calls
            calls += 1
            return str(tokenizer.decode(tokens, **options))

    stream = TextStream(Counting(), ["stop"])  # type: ignore[arg-type]
    text = "st" * 32 + "stop"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for first in range(0, 64, 16):
        stream.push(tokens[first : first + 16])
    assert not stream.stopped and calls <= 12  # before: 127
    stream.push(tokens[64:])
    assert stream.stopped and stream.tokens == tokens
