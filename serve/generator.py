"""``Generator``: draws completions with the worker that holds the model, as they get slots of its batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat, starmap
from typing import Any

from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.types import FinishReason
from serve.admission import AdmissionQueue, Claim
from serve.generate_worker import Generate, ScorePrompt, Started, Step
from serve.worker_channel import Cancel
from serve.worker_client import Call, Deadline, WorkerClient

_GAP_S = 0.001
"""Least seconds between two events of a stream, times the number of open streams: the cost of events per second then
does not grow with the number of streams."""
_UNREAD = 256
"""Most tokens of one completion of a stream that wait for its reader; then the request leaves the batch until they are
read."""
_PER_PREEMPTION = 16
"""A completion is preempted once it has drawn a token for each so many of its context, which is computed anew when it
comes back."""


@dataclass
class Chunk:
    """New tokens of one completion of a request."""

    index: int
    drawn: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any], finish: FinishReason | None
    ) -> None:
        """``tops`` is empty where nobody asked for them."""
        self.drawn += starmap(ScoredToken, zip(tokens, logprobs, tops or repeat(()), strict=False))
        self.finish = finish


class GenerateCall(Call):
    """The completions of one request: those in the worker's batch, and what all of them have drawn.

    Completions leave the batch when others need their slots, or when nobody reads them, and come back later: they go on
    where they were, because their tokens depend on their keys only. Iterating waits for new tokens.

    Args:
        live: tokens are read as they arrive, not only at the end.
    """

    claim: Claim

    def __init__(self, uid: int, job: Generate, *, live: bool, send: Callable[[int, Any], None]) -> None:
        super().__init__(uid)
        self.live, self._job, self._send = live, job, send
        self.heard = False
        """True once the reader has been woken for the first tokens."""
        self.on_read: Callable[[], None] | None = None
        """Called once when what has arrived is read."""
        self.left = set(range(len(job.keys)))
        """Indices of the completions that are not finished."""
        self.idle = list(range(len(job.keys)))
        """Indices of those that wait for a slot."""
        self.sequences: dict[int, int] = {}
        """Sequences in the worker's batch, by index."""
        self._chunks: dict[int, Chunk] = {}  # that are not read yet, by index
        self._drawn: list[list[int]] = [[] for _ in job.keys]
        self._stays: dict[int, int] = {}  # number of the stay, by index, of those that have a slot
        self._new_stay = count()
        self._since_joined = 0  # tokens

    def __aiter__(self) -> GenerateCall:
        return self

    async def __anext__(self) -> list[Chunk]:
        while True:
            if self._chunks and (self._ended or self._news.is_set()):
                self._news.clear()
                chunks, self._chunks = list(self._chunks.values()), {}
                if self.on_read is not None:
                    on_read, self.on_read = self.on_read, None
                    on_read()
                return chunks
            if self._ended:
                raise self._failure or StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    def wake(self) -> None:
        """Lets the reader take the tokens that have arrived."""
        self.heard = True
        self._news.set()

    def add(self, index: int, tokens: Sequence[int], *drawn: Any) -> int:
        """Adds tokens of a completion; returns how many of it wait for the reader."""
        self._drawn[index] += tokens
        self._since_joined += len(tokens)
        if index not in self._chunks:
            self._chunks[index] = Chunk(index)
        self._chunks[index].add(tokens, *drawn)
        return len(self._chunks[index].drawn)

    def join(self, slots: int) -> None:
        """Sends some of the idle completions to the worker, those together that have not begun."""
        mine, self.idle = self.idle[:slots], self.idle[slots:]
        begun = [i for i in mine if self._drawn[i]]
        parts = [[i for i in mine if not self._drawn[i]], *([i] for i in begun)]
        for part in filter(None, parts):
            stay = next(self._new_stay)
            self._stays.update(dict.fromkeys(part, stay))
            keys, drawn = [self._job.keys[i] for i in part], tuple(self._drawn[part[0]])
            self._send(self.uid, replace(self._job, keys=keys, stay=stay, indices=tuple(part), drawn=drawn))
        self._since_joined = 0

    def preempt(self, slots: int) -> list[int]:
        """Takes completions out of the batch for a while, those that have drawn least; returns their sequences."""
        mine = sorted(self._stays, key=lambda i: len(self._drawn[i]))[:slots]
        self._send(self.uid, Cancel(frozenset(mine)))
        self.idle += mine
        for i in mine:
            del self._stays[i]
        return [self.sequences.pop(i) for i in mine if i in self.sequences]

    def may_preempt(self) -> bool:
        """True if its last completion in the batch has drawn enough there for the cost of coming back."""
        longest = max((len(self._drawn[i]) for i in self._stays), default=0)
        return self._since_joined * _PER_PREEMPTION >= len(self._job.prompt_ids) + longest

    def start(self, stay: int, indices: Sequence[int], sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Notes that a stay has begun; (sequence, index) of the completions that are still in it."""
        for i, sequence in zip(indices, sequences, strict=True):
            if self._stays.get(i) == stay:
                self.sequences[i] = sequence
                yield sequence, i

    def finish(self, index: int) -> bool:
        """Notes that a completion is finished; returns whether it had a slot."""
        self.left.discard(index)
        if index in self.idle:
            self.idle.remove(index)
        self.sequences.pop(index, None)
        return self._stays.pop(index, None) is not None


class Generator(WorkerClient):
    """The client of the worker that holds the model."""

    def __init__(self, *, max_batch_size: int, max_queue: int) -> None:
        super().__init__()
        self.slots = AdmissionQueue(max_batch_size, max_waiting=max_queue)
        self._owners: dict[int, tuple[GenerateCall, int]] = {}  # by sequence: whose, and the index of its completion
        self._streams = 0
        self._unread: set[GenerateCall] = set()  # streams with tokens for which their reader has not been woken
        self._woken_at = 0.0
        self._wake_timer: asyncio.TimerHandle | None = None

    async def generate(
        self, job: Generate, *, live: bool, deadline: Deadline, bounded: bool, stopped: Set[int] = frozenset()
    ) -> AsyncGenerator[list[Chunk], None]:
        """Draws one completion per key, each as soon as it gets a slot.

        Args:
            live: yield tokens as they arrive, not all at the end.
            bounded: raise ``QueueFull`` when the queue is full, instead of waiting.
            stopped: set to which the caller adds the indices of completions that are to be stopped.
        """
        with self.draw(job, deadline=deadline, live=live, bounded=bounded) as call:
            async for chunks in call:
                yield chunks
                if stopped:
                    self.stop(call, stopped)

    async def score_prompt(self, job: ScorePrompt, *, deadline: Deadline, bounded: bool) -> list[ScoredToken]:
        """The log-probabilities of a prompt's own tokens; waits for a slot like a completion."""
        async with deadline.limit():
            claim = await self.slots.acquire(bounded=bounded)
        return list(await self.ask(job, deadline=deadline, on_end=lambda: self.slots.leave(claim)))

    @contextmanager
    def draw(self, job: Generate, *, deadline: Deadline, live: bool, bounded: bool) -> Iterator[GenerateCall]:
        """Context manager: the completions of a job join the batch as they get slots; leaving it early cancels them.

        Raises:
            QueueFull: ``bounded``, and too many requests wait.
            ApiError: see `ask`; also while reading.
        """
        call = GenerateCall(next(self._uids), job, live=live, send=self._send)
        call.claim = Claim(
            wants=len(job.keys),
            give=call.join,
            preempt=lambda slots: self._disown(call.preempt(slots)),
            may_preempt=call.may_preempt,
            refuse=lambda error: self._fail(call, error),
            evaluation=job.evaluation,
        )
        call.on_end = partial(self.slots.leave, call.claim)
        with self._registered(call, deadline):
            self._streams += live
            try:
                self.slots.enter(call.claim, bounded=bounded)
                yield call
            finally:
                self._streams -= live

    def stop(self, call: GenerateCall, indices: Set[int]) -> None:
        """Stops the drawing of the completions with these indices."""
        if call.uid in self.calls and (unfinished := indices & call.left):
            self._send(call.uid, Cancel(frozenset(unfinished)))
            self._disown([call.sequences[i] for i in unfinished if i in call.sequences])
            self._finish({call: unfinished})

    def _finish(self, finished: Mapping[GenerateCall, Iterable[int]]) -> None:
        """Gives back the slots of completions that are finished, and ends the calls that have no others.

        All are marked before any slot is given away: one that has ended could be preempted otherwise, and come back.
        """
        held = {call.claim: sum([call.finish(i) for i in indices]) for call, indices in finished.items()}
        for call in finished:
            call.claim.wants = 0 if call.on_read is not None else len(call.idle)
        self.slots.release(held)
        for call in finished:
            if not call.left:
                self._forget(call)
                call.end()

    def _pause(self, call: GenerateCall) -> None:
        """Takes a stream out of the batch until its reader has read."""
        claim = call.claim
        self._disown(call.preempt(claim.has))
        call.on_read = lambda: self.slots.want(claim, len(call.idle))
        claim.wants = 0
        self.slots.release({claim: claim.has})

    def _disown(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._owners.pop(sequence, None)

    def _forget(self, call: Call) -> None:
        if isinstance(call, GenerateCall):
            self._disown(call.sequences.values())
            call.on_read = None
            self._unread.discard(call)
        super()._forget(call)

    def _handle(self, message: Any) -> None:
        if isinstance(message, Step):
            self._hand_out(message.columns)
            return
        call = self.calls.get(message.uid)
        if not isinstance(message, Started):
            if isinstance(call, GenerateCall):  # it has failed, and others of its completions may go on
                self._send(message.uid, Cancel())
            super()._handle(message)
        elif isinstance(call, GenerateCall):  # else it was cancelled meanwhile
            for sequence, i in call.start(message.stay, message.indices, message.sequences):
                self._owners[sequence] = call, i

    def _hand_out(self, columns: Sequence[tuple[Any, ...]]) -> None:
        """Gives the tokens of one step to their calls."""
        finished: dict[GenerateCall, list[int]] = {}
        behind: dict[GenerateCall, None] = {}
        for sequence, *drawn, finish in zip(*columns, strict=True):
            if sequence not in self._owners:
                continue  # cancelled meanwhile
            call, i = self._owners[sequence]
            unread = call.add(i, *drawn, finish)
            if finish is not None:
                del self._owners[sequence]
                finished.setdefault(call, []).append(i)
            if call.live:
                if unread >= _UNREAD:
                    behind[call] = None
                if call.heard:
                    self._unread.add(call)
                else:
                    call.wake()
        self._finish(finished)
        for call in behind:
            if call.uid in self.calls:
                self._pause(call)
        if self._unread and self._wake_timer is None:
            loop = asyncio.get_running_loop()
            self._wake_timer = loop.call_at(self._woken_at + _GAP_S * self._streams, self._wake_readers)

    def _wake_readers(self) -> None:
        self._wake_timer, self._woken_at = None, asyncio.get_running_loop().time()
        for call in self._unread:
            call.wake()
        self._unread.clear()
