"""Incremental detokenization: no half-decoded characters, and stop strings are found however tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF = "\N{REPLACEMENT CHARACTER}"  # what decoders write for the first bytes of a character
_MOST_HELD = 8  # tokens that wait for the rest of a character, which no tokenizer cuts into more than four


class TextStream:
    """The text of one completion while it grows.

    ``tokens`` counts what belongs to the text: with a stop string, everything up to the token that completes it, no
    matter how many more had been drawn when it was noticed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), *, prefix: str = "", min_tokens: int = 0
    ) -> None:
        self._tokenizer, self._stops, self._min_tokens = tokenizer, [stop for stop in stops if stop], min_tokens
        # next to a special token, text depends on what is decoded with it; where spaces are taken away, all text does
        self._by_one = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()) if self._stops else ())
        self.tokens: list[int] = []
        self.stopped = False
        self.prefix = prefix
        self.text = prefix  # all of it, including what is held back
        self._sent = len(prefix)  # the caller sends it
        self._anchor = self._read = 0  # tokens[anchor:read] are decoded as context of the new ones

    def push(self, tokens: Sequence[int]) -> str:
        """Takes new tokens and returns the text that may be sent now."""
        if self.stopped:
            return ""
        if not self._stops:
            self.tokens += tokens
            self._decode(final=False)
            return self._send(len(self.text))
        for token in () if self._take_at_once(tokens) else tokens:
            self.tokens.append(token)
            before = len(self.text)
            self._decode(final=False)
            if self._cut(before):
                break
        return self._send(len(self.text) if self.stopped else self._safe_end())

    def _take_at_once(self, tokens: Sequence[int]) -> bool:
        """Takes tokens that, decoded together, surely complete no stop string, as almost always; else it takes none:
        which of them ends the text is only seen one after the other, and so is what bytes that are no text become."""
        if len(tokens) < 2 or self._by_one or not self._special.isdisjoint(tokens):
            return False
        text, anchor, read = self.text, self._anchor, self._read
        self.tokens += tokens
        self._decode(final=False)
        seen = self.text[max(0, len(text) - max(map(len, self._stops)) + 1) :]
        last = str(self._tokenizer.decode(tokens[-1:], skip_special_tokens=True))
        whole = self._read == len(self.tokens) and _HALF not in seen + last
        if whole and not any(stop in seen for stop in self._stops):
            self._anchor = self._read - 1  # as if it had come alone
            return True
        del self.tokens[-len(tokens) :]
        self.text, self._anchor, self._read = text, anchor, read
        return False

    def finish(self) -> str:
        """The rest of the text."""
        if not self.stopped:
            before = len(self.text)
            self._decode(final=True)
            self._cut(before)
        return self._send(len(self.text))

    def _decode(self, *, final: bool) -> None:
        if self._read == len(self.tokens):
            return  # nothing is held back, and a call of the tokenizer takes as long as a token of a small model
        decode, known = self._tokenizer.decode, self.tokens[self._anchor : self._read]
        context = str(decode(known, skip_special_tokens=True)) if known else ""
        whole = str(decode(self.tokens[self._anchor :], skip_special_tokens=True))
        if whole.endswith(_HALF) and not final and len(self.tokens) - self._read < _MOST_HELD:
            return
        self.text += whole[len(context) :]
        self._anchor, self._read = self._read, len(self.tokens)

    def _cut(self, before: int) -> bool:
        """Ends the text before the first stop string that reaches beyond ``before``, once there are enough tokens."""
        if len(self.tokens) <= self._min_tokens and self._min_tokens:
            return False
        found = [at for stop in self._stops if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def _safe_end(self) -> int:
        """Where text begins that may turn out to be a stop string."""
        for begin in range(max(self._sent, len(self.text) - max(map(len, self._stops)) + 1), len(self.text)):
            if any(stop.startswith(self.text[begin:]) for stop in self._stops):
                return begin
        return len(self.text)

    def _send(self, end: int) -> str:
        part = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return part
