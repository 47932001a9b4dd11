"""``GrammarChecker``: compiles the grammars of requests in processes that can be killed, before the model's does."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_pl.rewards.sandbox.task_queue import Verdict
from grpo_pl.rewards.sandbox.worker_threads import SandboxSettings, WorkerStartError, WorkerThreads
from serve import grammar_judge
from serve.admission import QueueFull
from serve.errors import ApiError, bad_request
from serve.grammar_judge import COMPILE_S
from serve.grammars import Grammar, SizedCache, is_available, vocabulary_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_SHORT_S = 0.1  # CPU seconds, which is enough for nearly all grammars
_MOST_SLOW = 3  # grammars that need longer, at once
_LATE = ("timeout", "killed")
_WALL_S = 5.0  # which the process itself should not need, as it bounds its fork
_MEMORY_MB = 1024  # of a process with llguidance's form of the vocabulary; each grammar is compiled in a fork of it
CACHE_BYTES = 8 << 20
"""Most memory of verdicts about earlier grammars."""


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
        self._verdicts: SizedCache[tuple[str, str], Verdict] = SizedCache(CACHE_BYTES)

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
