"""Restricts completions to a JSON schema, a regular expression or a list of choices, with llguidance."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_GRAMMAR = 1 << 15
"""Most characters of a schema or an expression."""
_KEPT = 32  # compiled grammars that wait for the next request with the same one
_MESSAGE = 300  # characters of llguidance's own words that reach a client


class Grammar(NamedTuple):
    """What completions must match, in the form that is sent to the worker."""

    kind: Literal["json", "regex", "choice", "lark"]
    text: str
    """A JSON schema, an expression, a JSON list of strings, or rules in llguidance's dialect of Lark."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or is too large to follow."""


def is_available() -> bool:
    """Whether llguidance is installed: ``pip install 'grpo_pl[structured]'``."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarMask:
    """The tokens with which one sequence may continue; a ``TokenMask``."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.error = ""
        """llguidance's message if the grammar turned out too complex while decoding; no token is allowed then."""

    def allowed(self, vocabulary: int) -> Tensor:
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        if self._matcher.is_error():  # its mask would let the sequence end as if the grammar were satisfied
            self.error = _first_line(self._matcher.get_error())
            return mask
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:vocabulary]
        mask[: len(bits)] = bits.bool()
        return mask

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Grammars:
    """Compiles grammars in a thread of the worker, beside the decoding loop, and caches the latest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos = tokenizer, sorted(eos_token_ids)
        thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._vocabulary: Any = None
        self.compile: Callable[[Grammar], Future[Any]] = lru_cache(_KEPT)(lambda g: thread.submit(self._compile, g))
        """Returns a future of the matcher, of which each ``GrammarMask`` gets a copy; it may raise ``GrammarError``."""

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._eos)
        # a decoding step waits for the mask: these limits bound its cost to a few milliseconds
        limits = LLParserLimits(step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False)
        try:
            source = _source(grammar)
        except ValueError as error:
            raise GrammarError(_first_line(str(error))) from None
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        return matcher


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.text))
    if grammar.kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    # at most one blank between the parts: small models would fill a completion with them
    return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": " ?"}))


def _vocabulary(tokenizer: Any, eos_token_ids: Sequence[int]) -> Any:
    from llguidance import LLTokenizer
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=list(eos_token_ids))
    except ValueError:  # llguidance reads byte-level tokenizers and those with a byte fallback
        return LLTokenizer(_PlainVocabulary(tokenizer), eos_token=list(eos_token_ids))  # type: ignore[arg-type]


class _PlainVocabulary:
    """Wraps a tokenizer whose tokens are named by their own text, for llguidance."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = list(tokenizer.all_special_ids)
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.tokens = [b"" if i in self.special_token_ids else name.encode() for i, name in enumerate(names)]
        probe = "Is 1 + 1 = 2?"
        if b"".join(self.tokens[i] for i in self(probe)).decode() != probe:
            raise GrammarError(f"structured outputs do not work with a tokenizer of class {type(tokenizer).__name__}.")

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _first_line(message: str) -> str:
    lines = message.strip().splitlines() or ["it cannot be compiled"]
    return lines[0][:_MESSAGE]
