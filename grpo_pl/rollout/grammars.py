"""Restricts completions to a JSON schema, a regular expression or a list of choices, with llguidance and its limits."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_GRAMMAR = 1 << 15
"""Most characters of a schema or an expression."""
COMPILE_S = 2.0
"""Most seconds of compiling one grammar."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 5_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
"""Arguments of ``LLParserLimits``."""
_BURST_S, _TOKEN_S = 0.05, 0.001
_THREADS = 2
_LATE = 256  # grammars that are remembered as too slow
_MOST_MULTIPLE, _MOST_TOGETHER = 1000, 8
_MESSAGE = 300  # characters of llguidance's own words that reach a client
_WORDS = {"NoExtensionBias": "no text of the model's tokens matches it"}


class Unusable(ValueError):
    """A grammar that cannot be compiled, or takes too much to follow; the message is for the client."""


class Grammar(NamedTuple):
    """A grammar that completions must match, in the form that is sent to the worker."""

    kind: Literal["json", "regex", "choice", "lark"]
    text: str
    """A JSON schema, an expression, a JSON list of strings, or rules in llguidance's dialect of Lark."""
    field: str
    """The field of the request that it comes from."""


def is_available() -> bool:
    """True if llguidance is installed: ``pip install 'grpo_pl[structured]'``."""
    return importlib.util.find_spec("llguidance") is not None


class CompiledGrammar:
    """The grammar of one request, and the time that its masks may take: a millisecond per token, and 50 ms that come
    back as unused. The decoding loop waits for masks, and with it all other completions."""

    def __init__(self, matcher: Any) -> None:
        self._matcher, self._left = matcher, _BURST_S
        self.error = ""
        """The reason why the grammar turned out too complex while decoding; no token is allowed then."""

    def mask(self) -> GrammarMask:
        """The mask of one further completion."""
        return GrammarMask(self, self._matcher.deep_copy())

    def spend(self, seconds: float, *, tokens: int = 0) -> None:
        """Takes the time that was needed for so many tokens, and sets ``error`` if that was more than is left."""
        self._left = min(_BURST_S, self._left + tokens * _TOKEN_S) - seconds
        if self._left < 0:
            self.error = "finding the tokens with which a text may go on takes too long"


class GrammarMask:
    """The tokens with which one completion may continue; a ``TokenMask``."""

    def __init__(self, grammar: CompiledGrammar, matcher: Any) -> None:
        self._grammar, self._matcher = grammar, matcher

    def allowed(self, vocabulary: int) -> Tensor:
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        if self._grammar.error:
            return mask
        began = time.thread_time()
        packed = self._matcher.compute_bitmask()
        self._grammar.spend(time.thread_time() - began)
        if self._matcher.is_error():  # its mask would let the text end as if the grammar were satisfied
            self._grammar.error = _first_line(self._matcher.get_error())
        if not self._grammar.error:
            told = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            bits = (told.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:vocabulary]
            mask[: len(bits)] = bits.bool()
        return mask

    def accept(self, token: int) -> None:
        if self._grammar.error or self._matcher.is_stopped():
            return
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._grammar.spend(time.thread_time() - began, tokens=1)


class Grammars:
    """Compiles grammars in threads beside the decoding, each within ``COMPILE_S``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos = tokenizer, sorted(eos_token_ids)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._vocabulary: Future[Any] | None = None
        self._late: deque[tuple[str, str]] = deque(maxlen=_LATE)

    def compile(self, grammar: Grammar, tell: Callable[[CompiledGrammar | str], None]) -> None:
        """Calls ``tell`` in a thread with the compiled grammar, or why it cannot be used."""
        key, told = (grammar.kind, grammar.text), threading.Event()

        def tell_once(result: CompiledGrammar | str) -> None:
            if not told.is_set():
                told.set()
                tell(result)

        def late() -> None:
            self._late.append(key)
            tell_once(_too_late())

        if key in self._late:
            tell(_too_late())
            return
        if self._vocabulary is None:
            self._vocabulary = self._threads.submit(vocabulary, self._tokenizer, self._eos)
        ready = self._vocabulary

        def work() -> None:
            timer = threading.Timer(COMPILE_S, late)
            timer.daemon = True
            try:
                read = ready.result()
                timer.start()  # only now: the vocabulary and the grammars of others may have taken longer
                # a matcher for each request: copies share a lexer, which grows with what they go through
                tell_once(CompiledGrammar(compiled(read, *key)))
            except Unusable as error:
                tell_once(f"the grammar cannot be used: {str(error).rstrip('.')}.")
            except Exception as error:  # llguidance may raise anything on a client's text
                log.exception("a grammar failed")
                tell_once(f"the grammar cannot be used: {type(error).__name__}.")
            finally:
                timer.cancel()

        self._threads.submit(work)


def _too_late() -> str:
    return f"the grammar cannot be used: compiling it takes more than {COMPILE_S:g} s."


def vocabulary(tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]) -> Any:
    """llguidance's form of a tokenizer.

    Raises:
        Unusable: a tokenizer whose tokens llguidance cannot read.
    """
    from llguidance import LLTokenizer

    backend = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    text = json.dumps(backend | {"padding": None, "truncation": None})
    try:
        return LLTokenizer(text, eos_token=list(eos))
    except ValueError:  # llguidance reads byte-level tokenizers and those with a byte fallback
        return LLTokenizer(_PlainVocabulary(text, list(tokenizer.all_special_ids), list(eos)), eos_token=list(eos))  # type: ignore[arg-type]


class _PlainVocabulary:
    """Wraps a tokenizer whose tokens are named by their own text, for llguidance."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: str, special: list[int], eos: list[int]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer)
        self.eos_token_id, self.bos_token_id, self.special_token_ids = eos[0], None, special
        names = [self._tokenizer.id_to_token(i) or "" for i in range(self._tokenizer.get_vocab_size())]
        self.tokens = [b"" if i in set(special) else name.encode() for i, name in enumerate(names)]
        probe = "Is 1 + 1 = 2?"
        if b"".join(self.tokens[i] for i in self(probe)).decode() != probe:
            raise Unusable("structured outputs do not work with the model's tokenizer")

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def compiled(vocabulary: Any, kind: str, text: str) -> Any:
    """A matcher of the grammar that has its first mask.

    Raises:
        Unusable: it cannot be compiled, or exceeds ``LIMITS``.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = _source(kind, text)
    except ValueError as error:
        raise Unusable(_first_line(str(error))) from None
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise Unusable(_first_line(matcher.get_error()))
    return matcher


def check_schema(schema: Any) -> None:
    """Refuses parts of a schema that ``LIMITS`` do not bound: llguidance would take minutes and gigabytes for them.

    Raises:
        Unusable: there is such a part.
    """
    if isinstance(schema, dict):
        multiple, all_of = schema.get("multipleOf"), schema.get("allOf")
        if isinstance(multiple, int | float) and multiple > _MOST_MULTIPLE:
            raise Unusable(f"multipleOf may be at most {_MOST_MULTIPLE}")
        if isinstance(all_of, list) and len(all_of) > _MOST_TOGETHER:
            raise Unusable(f"allOf may have at most {_MOST_TOGETHER} members")
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        check_schema(each)


def _source(kind: str, text: str) -> str:
    from llguidance import LLMatcher

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        return str(LLMatcher.grammar_from_lark(text))
    if kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    try:
        check_schema(json.loads(text))
    except RecursionError:
        raise Unusable("the schema nests too deeply") from None
    # at most one blank between the parts: small models would fill a completion with them
    return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": " ?"}))


def _first_line(message: str) -> str:
    """The first line of one of llguidance's messages, shortened."""
    lines = message.strip().splitlines() or ["it cannot be compiled"]
    return _WORDS.get(lines[0], lines[0])[:_MESSAGE]
