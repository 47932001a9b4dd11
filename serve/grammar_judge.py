"""Compiles grammars with llguidance within limits, and tries out in the sandbox whether one keeps them.

A sandbox worker loads this file by its path, for it knows no other part of this package, and the process that holds
the model imports it, so that both compile a grammar alike.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import time
from typing import Any

from grpo_pl.processes.resource_limits import kill_with_parent, limit_memory

COMPILE_S = 0.5
"""Most CPU seconds of compiling one grammar."""
MOST_BYTES = 32 << 20
"""Most memory of one compiled grammar, and most that it may grow by while completions follow it."""
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
"""Arguments of ``LLParserLimits``. They bound most steps, but not all: compiling an intersection of patterns, for
example, or the mask of a very long literal."""
MEMORY = 512 << 20
"""Most memory while a grammar is tried out."""
_BURST_S, _TOKEN_S = 0.05, 0.001
_TRIED = 64  # tokens
_WAIT_S = 1.0  # by the clock, besides the CPU time, on a busy machine
_WORDS = {"NoExtensionBias": "no text of the model's tokens matches it"}
_MESSAGE = 300  # characters of llguidance's own words that reach a client


class Unusable(ValueError):
    """A grammar that cannot be compiled, or takes too much to follow; the message is for the client."""


class Budget:
    """The CPU time that masks of one request may take: a millisecond per token, and 50 ms that come back as unused.

    The decoding loop waits for masks, and with it all other completions.
    """

    def __init__(self) -> None:
        self._left = _BURST_S

    def spend(self, seconds: float, tokens: int = 0) -> None:
        """Takes ``seconds``, which were needed for so many tokens.

        Raises:
            Unusable: more than there were left.
        """
        self._left = min(_BURST_S, self._left + tokens * _TOKEN_S) - seconds
        if self._left < 0:
            raise Unusable("finding the tokens with which a text may go on takes too long")


def vocabulary(tokenizer: str, special: list[int], eos: list[int]) -> Any:
    """llguidance's form of a tokenizer that is given as the JSON text of the library ``tokenizers``.

    Raises:
        Unusable: a tokenizer whose tokens llguidance cannot read.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer, eos_token=eos)
    except ValueError:  # llguidance reads byte-level tokenizers and those with a byte fallback
        return LLTokenizer(_PlainVocabulary(tokenizer, special, eos), eos_token=eos)  # type: ignore[arg-type]


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
        raise Unusable(first_line(str(error))) from None
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise Unusable(first_line(matcher.get_error()))
    return matcher


def _source(kind: str, text: str) -> str:
    from llguidance import LLMatcher

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        return str(LLMatcher.grammar_from_lark(text))
    if kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    # at most one blank between the parts: small models would fill a completion with them
    return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": " ?"}))


def first_line(message: str) -> str:
    """The first line of one of llguidance's messages, shortened."""
    lines = message.strip().splitlines() or ["it cannot be compiled"]
    return _WORDS.get(lines[0], lines[0])[:_MESSAGE]


# --- in the sandbox ---------------------------------------------------------------------------------------------------

_vocabulary: Any = None
_fault = ""


def prepare(data: str) -> None:
    """Takes the tokenizer: a JSON object with the arguments of ``vocabulary``."""
    global _vocabulary, _fault
    try:
        _vocabulary = vocabulary(**json.loads(data))
    except Unusable as error:
        _fault = str(error)
    judge("10", '["regex", "a{1,3}"]', 0.0)  # does late imports


def judge(limit_s: str, grammar: str, relative_tolerance: float) -> tuple[str, str]:
    """``ok`` with the bytes of the compiled grammar, a JSON list of kind and text, if it keeps the limits, also over a
    random text; ``wrong`` with the reason; ``timeout`` after ``limit_s`` CPU seconds, ``killed`` after too many of the
    clock.

    A forked process does it, so that what ends it costs no new start of this one, and no memory is left behind.
    """
    if _vocabulary is None:
        return "wrong", _fault
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _limit(float(limit_s))
            os.write(writing, json.dumps(_verdict(*json.loads(grammar))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        late = not select.select([told], [], [], float(limit_s) + _WAIT_S)[0]
        if late:
            os.kill(child, signal.SIGKILL)
        reply = told.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if reply:
        status, detail = json.loads(reply)
        return status, detail
    if late or code == -signal.SIGPROF:
        return "killed" if late else "timeout", ""
    return "wrong", f"compiling it takes more than {MEMORY >> 20} MiB, or nests too deeply"


def _limit(seconds: float) -> None:
    """Lets the kernel end this process after so much CPU time, or with its parent, and bounds its memory."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    kill_with_parent()
    limit_memory(MEMORY, beyond_now=True)


def _verdict(kind: str, text: str) -> tuple[str, str]:
    before, began = _heap(), time.process_time()
    try:
        matcher = compiled(_vocabulary, kind, text)
        seconds = time.process_time() - began
        if seconds > COMPILE_S:
            raise Unusable(f"compiling it takes {seconds:.2f} s, and {COMPILE_S:g} s are allowed")
        _try_out(matcher.deep_copy())
        size = _heap() - before
        if size > MOST_BYTES:
            raise Unusable(f"compiled it has {size >> 20} MiB, and {MOST_BYTES >> 20} are allowed")
    except Unusable as error:
        return "wrong", str(error)
    return "ok", str(max(size, len(text)))


def _try_out(matcher: Any) -> None:
    """Follows a random text for a few tokens.

    Raises:
        Unusable: a mask takes too long or too much.
    """
    budget, rng = Budget(), random.Random(0)
    for _ in range(_TRIED):
        began = time.process_time()
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise Unusable(first_line(matcher.get_error()))
        budget.spend(time.process_time() - began, tokens=1)
        some = [i for i, byte in enumerate(allowed) if byte]
        if matcher.is_stopped() or not some:
            return
        at = rng.choice(some)
        token = 8 * at + rng.choice([bit for bit in range(8) if allowed[at] >> bit & 1])
        began = time.process_time()
        matcher.consume_token(token)
        budget.spend(time.process_time() - began)


class _Mallinfo(ctypes.Structure):
    """glibc's statistics of its memory."""

    _fields_ = [
        *((f"_{i}", ctypes.c_size_t) for i in range(4)),
        ("mapped", ctypes.c_size_t),
        *((f"_{i}", ctypes.c_size_t) for i in range(5, 7)),
        ("allocated", ctypes.c_size_t),
        *((f"_{i}", ctypes.c_size_t) for i in range(8, 10)),
    ]


def _heap() -> int:
    """Bytes that this process has allocated; 0 where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _Mallinfo
    told = ask()
    return int(told.allocated + told.mapped)
