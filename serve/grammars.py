"""Restricts completions to a JSON schema, a regular expression or a list of choices, with llguidance.

``GrammarChecker`` compiles the grammars of requests in processes that can be killed, before ``Grammars`` does it in the
model's process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from grpo_pl.rewards.sandbox.task_queue import Verdict
from grpo_pl.rewards.sandbox.worker_threads import SandboxSettings, WorkerStartError, WorkerThreads
from serve import grammar_judge
from serve.admission import QueueFull
from serve.errors import ApiError, bad_request
from serve.grammar_judge import COMPILE_S, MOST_BYTES, Budget, Unusable, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_GRAMMAR = 1 << 15
"""Most characters of a schema or an expression."""
CACHE_BYTES = 64 << 20
"""Most memory of compiled grammars that wait for the next request with the same one."""
HELD_BYTES = 256 << 20
"""Most memory of all compiled grammars; while there is no room, those of further requests wait."""
_RETIRED_BYTES = 8 << 20  # growth after which later requests get a new lexer: it keeps what any of them went through
_THREADS = 2
_SHORT_S = 0.1  # CPU seconds, which is enough for nearly all grammars
_MOST_SLOW = 3  # grammars that need longer, at once
_LATE = ("timeout", "killed")
_WALL_S = 5.0  # which the process itself should not need, as it bounds its fork
_MEMORY_MB = 1024  # of a process with llguidance's form of the vocabulary; each grammar is compiled in a fork of it
_VERDICT_BYTES = 8 << 20  # of verdicts about earlier grammars


class Grammar(NamedTuple):
    """A grammar that completions must match, in the form that is sent to the worker."""

    kind: Literal["json", "regex", "choice", "lark"]
    text: str
    """A JSON schema, an expression, a JSON list of strings, or rules in llguidance's dialect of Lark."""
    field: str
    """The field of the request that it comes from."""
    bytes: int = 0
    """Memory of its compiled form, as the check found out."""

    @property
    def key(self) -> tuple[str, str]:
        """Grammars with equal keys have the same compiled form."""
        return self.kind, self.text


def is_available() -> bool:
    """True if llguidance is installed: ``pip install 'grpo_pl[structured]'``."""
    return importlib.util.find_spec("llguidance") is not None


def vocabulary_data(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> str:
    """The arguments of ``grammar_judge.vocabulary`` for a tokenizer, as JSON."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    backend |= {"padding": None, "truncation": None}
    told = {"tokenizer": json.dumps(backend), "special": list(tokenizer.all_special_ids), "eos": list(eos_token_ids)}
    return json.dumps(told)


class Compiled:
    """A compiled grammar; its matchers share one lexer, which grows with what they go through."""

    def __init__(self, size: int) -> None:
        self.bytes, self.grown, self.broken = size, 0, False
        self.matcher: Future[Any] = Future()
        """May raise ``Unusable``."""
        self.users = 0
        """Requests that wait for it."""


class GrammarMask:
    """The tokens with which one sequence may continue; a ``TokenMask``.

    Args:
        compiled: the grammar, whose matcher is copied.
        budget: the time for all masks of a request.
    """

    def __init__(self, compiled: Compiled, budget: Budget, resident: Callable[[], int]) -> None:
        self._matcher, self._compiled = compiled.matcher.result().deep_copy(), compiled
        self._budget, self._resident = budget, resident
        self.error = ""
        """The reason why the grammar turned out too complex while decoding; no token is allowed then."""

    def allowed(self, vocabulary: int) -> Tensor:
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        if not self.error:
            packed = self._within_limits(self._matcher.compute_bitmask)
            if not self.error:
                told = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                bits = (told.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[:vocabulary]
                mask[: len(bits)] = bits.bool()
        return mask

    def accept(self, token: int) -> None:
        if not self.error and not self._matcher.is_stopped():
            self._within_limits(self._matcher.consume_token, token, tokens=1)  # also of tokens drawn in an earlier stay

    def _within_limits(self, call: Callable[..., Any], *arguments: Any, tokens: int = 0) -> Any:
        """Returns the result of ``call``, counts it towards the limits, and sets ``error`` if one is passed."""
        compiled, before, began = self._compiled, self._resident(), time.thread_time()
        result = call(*arguments)
        spent = time.thread_time() - began
        compiled.grown += max(0, self._resident() - before)
        try:
            # the mask of a matcher with an error would let the text end as if the grammar were satisfied
            if not tokens and self._matcher.is_error():
                raise Unusable(first_line(self._matcher.get_error()))
            if compiled.grown > MOST_BYTES:
                raise Unusable("finding the tokens with which a text may go on takes too much memory")
            self._budget.spend(spent, tokens)
        except Unusable as error:
            self.error, compiled.broken = str(error), True
        return result


class SizedCache(Generic[K, V]):
    """A dictionary whose values have sizes; when their sum exceeds ``most_bytes``, the least recently used ones go."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of ``key``, which counts as used now; None if there is none."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Adds a value, or changes it and its size; one that is larger than the cache is not kept."""
        self.discard(key)
        self._entries[key] = value, size
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.discard(next(iter(self._entries)))

    def clear(self) -> None:
        """Removes all values."""
        self._entries.clear()
        self.bytes = 0

    def discard(self, key: K) -> None:
        """Removes a value if it is there."""
        self.bytes -= self._entries.pop(key, (None, 0))[1]


class Grammars:
    """Compiles grammars in threads of the worker, beside the decoding loop, and caches the latest.

    What comes here has been compiled by a ``GrammarChecker`` before, so it takes half a second at most.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos = tokenizer, sorted(eos_token_ids)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._vocabulary: Future[Any] | None = None
        self._live: WeakSet[Compiled] = WeakSet()
        self.cache: SizedCache[tuple[str, str], Compiled] = SizedCache(CACHE_BYTES)
        self._resident = _resident_memory()

    def compile(self, grammar: Grammar) -> Compiled | None:
        """Begins to compile a grammar, or gives the cached form; None while there is no room for it."""
        compiled = self.cache.get(grammar.key)
        if compiled is not None and (compiled.broken or compiled.grown > _RETIRED_BYTES):
            self.cache.discard(grammar.key)
            compiled = None
        if compiled is None:
            held = sum(other.bytes + other.grown for other in self._live)
            if held and held + grammar.bytes > HELD_BYTES:
                self.cache.clear()
                return None
            if self._vocabulary is None:
                self._vocabulary = self._threads.submit(self._make_vocabulary)
            compiled = Compiled(grammar.bytes)
            compiled.matcher = self._threads.submit(self._compile, grammar, self._vocabulary)
            self._live.add(compiled)
        self.cache.put(grammar.key, compiled, compiled.bytes + compiled.grown)
        compiled.users += 1
        return compiled

    def give_up(self, grammar: Grammar, compiled: Compiled) -> None:
        """Takes back a request for a grammar; it is not compiled if no other request waits for it."""
        compiled.users -= 1
        if not compiled.users and compiled.matcher.cancel():
            self.cache.discard(grammar.key)

    def masks(self, compiled: Compiled, count: int) -> list[GrammarMask]:
        """A mask for each of ``count`` sequences of a request.

        Raises:
            Unusable: the grammar cannot be compiled.
        """
        compiled.users -= 1
        budget = Budget()
        return [GrammarMask(compiled, budget, self._resident) for _ in range(count)]

    def _make_vocabulary(self) -> Any:
        return grammar_judge.vocabulary(**json.loads(vocabulary_data(self._tokenizer, self._eos)))

    def _compile(self, grammar: Grammar, vocabulary: Future[Any]) -> Any:
        return grammar_judge.compiled(vocabulary.result(), grammar.kind, grammar.text)


def _resident_memory() -> Callable[[], int]:
    """A function that returns the bytes of memory of this process, in microseconds; 0 where the system does not say."""
    try:
        file, page = os.open("/proc/self/statm", os.O_RDONLY), resource.getpagesize()
    except OSError:
        return lambda: 0
    return lambda: int(os.pread(file, 64, 0).split()[1]) * page


class GrammarChecker:
    """Compiles grammars in two processes with limits on CPU time and memory; one that passes there needs no more in the
    model's process.

    Args:
        tokenizer: the model's.
        max_queue: grammars that may wait; further ones are refused with 429.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_queue: int) -> None:
        self._tokenizer, self._max_queue = tokenizer, max_queue
        self._asking, self._slow, self._one_slow = 0, 0, asyncio.Semaphore(1)
        self._threads: WorkerThreads | None = None
        self._verdicts: SizedCache[tuple[str, str], Verdict] = SizedCache(_VERDICT_BYTES)

    async def start(self) -> None:
        """Starts the processes, if llguidance is installed."""
        if not is_available():
            return
        settings = SandboxSettings(
            judge=str(Path(grammar_judge.__file__).resolve()),
            data=await asyncio.to_thread(vocabulary_data, self._tokenizer, [self._tokenizer.eos_token_id]),
            soft_limit_s=0.9 * COMPILE_S,  # of the process that forks and waits
            hard_limit_s=COMPILE_S,
            wall_factor=_WALL_S / COMPILE_S,
            memory_limit_mb=_MEMORY_MB,
        )
        self._threads = WorkerThreads(settings)
        try:
            await asyncio.to_thread(self._threads.wait_until_ready)
        except WorkerStartError as error:  # tried again with each grammar
            log.warning("grammars cannot be checked: %s", error)

    def close(self) -> None:
        """Ends the processes."""
        if self._threads is not None:
            self._threads.close()

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar with the size of its compiled form; cancelling it ends a check within ``COMPILE_S`` CPU seconds.

        Raises:
            QueueFull: too many checks wait (429).
            ApiError: it cannot be used (400), or nothing could be found out about it (500).
        """
        verdict = self._verdicts.get(grammar.key)
        if verdict is None:
            verdict = await self._ask(json.dumps(grammar.key))
            if verdict.status in ("ok", "wrong", "timeout"):
                self._verdicts.put(grammar.key, verdict, len(json.dumps(grammar.key)) + len(verdict.detail))
        if verdict.status == "ok":
            return grammar._replace(bytes=int(verdict.detail))
        if verdict.status in ("unavailable", "crashed"):
            raise ApiError(500, f"grammars cannot be checked: {verdict.detail}", code="worker_error")
        why = f"compiling it takes more than {COMPILE_S:g} s" if verdict.status in _LATE else verdict.detail.rstrip(".")
        raise bad_request(grammar.field, f"the grammar cannot be used: {why}.")

    async def _ask(self, grammar: str) -> Verdict:
        """Gives a grammar a short time, and a longer one to those that need it, one after the other: so one process is
        always left for all others."""
        if self._asking >= self._max_queue:
            raise QueueFull(self._asking)
        self._asking += 1
        try:
            verdict = await self._judged(_SHORT_S, grammar)
            if verdict.status not in _LATE:
                return verdict
            if self._slow >= _MOST_SLOW:
                message = "several grammars that take long to compile are being checked; try again shortly."
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            self._slow += 1
            try:
                async with self._one_slow:
                    return await self._judged(1.1 * COMPILE_S, grammar)
            finally:
                self._slow -= 1
        finally:
            self._asking -= 1

    async def _judged(self, limit_s: float, grammar: str) -> Verdict:
        assert self._threads is not None, "grammars are refused where llguidance is missing"
        return await asyncio.wrap_future(self._threads.submit((f"{limit_s}", grammar)))
