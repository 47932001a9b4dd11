"""The front process's end of the line to a worker: places in the batch, deadlines, cancelling, lost workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.types import FinishReason
from serve.errors import ApiError, bad_request
from serve.generate_worker import Generate, ScorePrompt, Started, Step
from serve.score_worker import ScoreItems
from serve.worker import Answer, Cancel, Frames, Refusal, packed

_GAP_S = 0.001
"""For each open stream, between two events of a stream: so events cost the same however many streams there are."""


class Deadline:
    """When a request began, and by when it must be done."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self._seconds - self.spent()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Ends what still waits inside when the time is up.

        Raises:
            ApiError: it is (504).
        """
        try:
            async with asyncio.timeout(self.left()):
                yield
        except TimeoutError:
            raise self.passed() from None

    def passed(self) -> ApiError:
        message = f"not finished within {self._seconds:g} s: ask for less at once, or later."
        return ApiError(504, message, code="deadline_exceeded")


@dataclass
class Chunk:
    """New tokens of one completion of a request."""

    index: int
    drawn: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    def add(self, token: int, logprob: float, top: Any, finish: FinishReason | None) -> None:
        self.drawn.append(ScoredToken(token, logprob, top))
        self.finish = finish


class Call:
    """A request to a worker: what has come of it and has not been read. Iterating waits, and gives the new tokens.

    Args:
        completions: that it draws; none, if it has one answer.
        live: its tokens are read as they come, not only at the end.
        on_end: called when the worker is done with it, which may be before everything has been read.
    """

    def __init__(self, uid: int, *, completions: int, live: bool, on_end: Callable[[], None]) -> None:
        self.uid, self.live, self.on_end = uid, live, on_end
        self.left = set(range(completions))
        """Completions that are still drawn."""
        self.sequences: list[int] = []
        """Their numbers in the batch."""
        self.answer: Any = None
        self.heard = False
        """Whether the reader has been told of a first token."""
        self._chunks: dict[int, Chunk] = {}
        self._news, self._ended = asyncio.Event(), False
        self._failure: ApiError | None = None

    def add(self, index: int, *drawn: Any) -> None:
        if index not in self._chunks:
            self._chunks[index] = Chunk(index)
        self._chunks[index].add(*drawn)

    def wake(self) -> None:
        """Lets the reader have what has come."""
        self.heard = True
        self._news.set()

    def end(self, failure: ApiError | None = None) -> None:
        """Nothing more comes."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._news.set()

    async def result(self) -> Any:
        """The one answer, of a request that draws nothing."""
        async for _ in self:
            pass
        return self.answer

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> list[Chunk]:
        while True:
            if self._chunks and (self._ended or self._news.is_set()):
                self._news.clear()
                chunks, self._chunks = list(self._chunks.values()), {}
                return chunks
            if self._ended:
                raise self._failure or StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class WorkerLine(asyncio.Protocol):
    """One worker process as the routes see it: ask, and read answers until the last one."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self._numbers, self._frames = count(), Frames()
        self._ended: Callable[[], ApiError] | None = None  # why nothing more comes
        self._rows: dict[int, tuple[Call, int]] = {}  # by sequence: the call and which of its completions
        self._streams = 0
        self._unread: set[Call] = set()  # streams with tokens that nobody has been told of
        self._told_at = 0.0
        self._telling: asyncio.TimerHandle | None = None

    @contextmanager
    def ask(
        self,
        payload: Any,
        *,
        deadline: Deadline,
        completions: int = 0,
        live: bool = False,
        on_end: Callable[[], None] = lambda: None,
    ) -> Iterator[Call]:
        """Sends ``payload``; see :class:`Call`. Leaving early, however that happens, cancels the work.

        Raises:
            ApiError: worker lost or server ending (503); while reading also refused (400), the worker's own failure
                (500), or too late (504).
        """
        if self._ended is not None:
            on_end()
            raise self._ended()
        call = Call(next(self._numbers), completions=completions, live=live, on_end=on_end)
        self.calls[call.uid] = call
        self._streams += live
        timer = asyncio.get_running_loop().call_later(deadline.left(), self._expire, call, deadline)
        self._send(call.uid, payload)
        try:
            yield call
        finally:
            timer.cancel()
            self._streams -= live
            self._cancel(call)

    def stop(self, call: Call, indices: set[int]) -> None:
        """Ends some of a call's completions."""
        indices &= call.left
        if indices:
            self._send(call.uid, Cancel(frozenset(indices)))
            call.left -= indices
            if not call.left:
                self._close(call)
                call.end()

    def fail_all(self, reason: Callable[[], ApiError]) -> None:
        """Everyone who waits for the worker hears now why no answer will come."""
        self._ended = reason
        for call in list(self.calls.values()):
            self._close(call)
            call.end(reason())

    def _expire(self, call: Call, deadline: Deadline) -> None:
        """Ends the work when the time is up, also where nobody reads: a client that stopped reading holds a place."""
        self._cancel(call)
        call.end(deadline.passed())

    def _cancel(self, call: Call) -> None:
        if self._close(call):
            self._send(call.uid, Cancel())

    def _close(self, call: Call) -> bool:
        """The worker owes nothing more; False if that was so before."""
        if self.calls.pop(call.uid, None) is None:
            return False
        for sequence in call.sequences:
            self._rows.pop(sequence, None)
        self._unread.discard(call)
        call.on_end()
        return True

    def _send(self, uid: int, payload: Any) -> None:
        self._transport.write(packed((uid, payload)))

    # --- what the worker says ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if isinstance(message, Step):
                self._hand_out(message.columns)
            elif (call := self.calls.get(message.uid)) is None:
                continue  # cancelled meanwhile
            elif isinstance(message, Started):
                call.sequences = message.sequences
                self._rows.update({sequence: (call, i) for i, sequence in enumerate(message.sequences)})
            else:
                self._close(call)
                if isinstance(message, Answer):
                    call.answer = message.data
                    call.end()
                elif isinstance(message.reason, Refusal):
                    call.end(bad_request(message.reason.message, param=message.reason.param, code=message.reason.code))
                else:
                    call.end(ApiError(500, message.reason, code="worker_error"))

    def _hand_out(self, columns: Sequence[tuple[Any, ...]]) -> None:
        for sequence, token, logprob, top, finish in zip(*columns, strict=True):
            if sequence not in self._rows:
                continue  # cancelled meanwhile
            call, i = self._rows[sequence]
            call.add(i, token, logprob, top, finish)
            if finish is not None:
                call.left.discard(i)
                if not call.left:
                    self._close(call)
                    call.end()
                    continue
            if not call.live:
                continue
            if call.heard:
                self._unread.add(call)
            else:
                call.wake()
        if self._unread and self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(self._told_at + _GAP_S * self._streams, self._tell)

    def _tell(self) -> None:
        self._telling, self._told_at = None, asyncio.get_running_loop().time()
        for call in self._unread:
            call.wake()
        self._unread.clear()


class QueueFull(ApiError):
    """No place, and too many wait for one already."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            429,
            f"{waiting} requests wait already; try again shortly.",
            code="queue_full",
            headers={"Retry-After": "1"},
        )


class Places:
    """Places in the running batch, given out in the order of asking; several at once or none.

    Evaluations hold at most ``share`` places together, so that a chat finds one free however many evaluations run;
    nobody waits behind an evaluation that is only short of its share.
    """

    def __init__(self, size: int, *, max_waiting: int) -> None:
        self.size, self.free, self._max_waiting = size, size, max_waiting
        self.share = max(1, size // 4)
        self._evaluating = 0  # places that evaluations hold
        self._line: list[_Turn] = []
        self._closed: Callable[[], ApiError] | None = None

    @property
    def waiting(self) -> int:
        """Those in line, evaluations included."""
        return sum(not turn.given.cancelled() for turn in self._line)

    async def take(self, count: int, *, bounded: bool, evaluation: bool = False) -> None:
        """Waits for ``count`` places.

        Raises:
            QueueFull: ``bounded``, and the line is full.
            ApiError: closed.
        """
        assert count <= (self.share if evaluation else self.size)
        if self._closed is not None:
            raise self._closed()
        turn = _Turn(count, evaluation, asyncio.get_running_loop().create_future())
        self._line.append(turn)
        self._serve_line()
        if turn.given.done():
            return
        ahead = sum(other.evaluation == evaluation for other in self._line)
        if bounded and ahead > self._max_waiting:
            self._line.remove(turn)
            raise QueueFull(ahead - 1)
        try:
            await turn.given
        except asyncio.CancelledError:
            if turn.given.cancelled():
                self._serve_line()  # who stood behind it may fit
            elif turn.given.exception() is None:
                self.give_back(count, evaluation=evaluation)
            raise

    def close(self, reason: Callable[[], ApiError]) -> None:
        """Refuses everyone in line and whoever comes; what has its places keeps them."""
        self._closed = reason
        while self._line:
            turn = self._line.pop()
            if not turn.given.done():
                turn.given.set_exception(reason())

    def give_back(self, count: int, *, evaluation: bool = False) -> None:
        self.free += count
        self._evaluating -= count if evaluation else 0
        self._serve_line()

    def _serve_line(self) -> None:
        short_of_share = False
        for turn in list(self._line):
            if turn.given.cancelled():
                self._line.remove(turn)
                continue
            if turn.evaluation and (short_of_share or self._evaluating + turn.places > self.share):
                short_of_share = True
                continue
            if turn.places > self.free:
                return
            self._line.remove(turn)
            self.free -= turn.places
            self._evaluating += turn.places if turn.evaluation else 0
            turn.given.set_result(None)


class _Turn(NamedTuple):
    places: int
    evaluation: bool
    given: asyncio.Future[None]


class Generator:
    """Completions from the worker that holds the model."""

    def __init__(self, *, max_batch_size: int, max_queue: int) -> None:
        self.line = WorkerLine()
        self.places = Places(max_batch_size, max_waiting=max_queue)

    async def generate(
        self, job: Generate, *, live: bool, deadline: Deadline, bounded: bool, stopped: Set[int] = frozenset()
    ) -> AsyncGenerator[list[Chunk], None]:
        """Draws one completion per key; more than fit in the batch are drawn in turns.

        Args:
            live: yield tokens as they come rather than all at the end.
            bounded: be refused when the queue is full, instead of waiting in it.
            stopped: the caller adds the indices of completions that it wants no more of.
        """
        size = self.places.share if job.evaluation else self.places.size
        for first in range(0, len(job.keys), size):
            part = replace(job, keys=job.keys[first : first + size])
            places = len(part.keys)
            async with deadline.limit():
                await self.places.take(places, bounded=bounded, evaluation=job.evaluation)
            on_end = partial(self.places.give_back, places, evaluation=job.evaluation)
            with self.line.ask(part, deadline=deadline, completions=places, live=live, on_end=on_end) as call:
                async for chunks in call:
                    for chunk in chunks:
                        chunk.index += first
                    yield chunks
                    if stopped:
                        self.line.stop(call, {i - first for i in stopped})

    async def score_prompt(self, job: ScorePrompt, *, deadline: Deadline, bounded: bool) -> list[ScoredToken]:
        """The log-probabilities of a prompt's own tokens, in turn with those who wait for a place."""
        async with deadline.limit():
            await self.places.take(1, bounded=bounded)
        with self.line.ask(job, deadline=deadline, on_end=lambda: self.places.give_back(1)) as call:
            return list(await call.result())


class Scorer:
    """Scores from the worker that holds the rewards."""

    def __init__(self, *, max_queue: int) -> None:
        self.line = WorkerLine()
        self._max_queue = max_queue
        self._asking = 0

    async def score(self, items: ScoreItems, *, deadline: Deadline, bounded: bool) -> list[Any]:
        """What the worker says about each item, in order; ``bounded`` requests may be refused when many wait."""
        if bounded and self._asking >= self._max_queue:
            raise QueueFull(self._asking)
        self._asking += bounded
        try:
            with self.line.ask(items, deadline=deadline) as call:
                return list(await call.result())
        finally:
            self._asking -= bounded
