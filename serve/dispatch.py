"""The front process's side of the connection to a worker: deadlines, cancelling, lost workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.types import FinishReason
from serve.errors import ApiError, bad_request
from serve.generate_worker import Generate, ScorePrompt, Started, Step
from serve.places import Places, QueueFull, Turn
from serve.score_worker import ScoreItems
from serve.worker import Answer, Cancel, Frames, Refusal, packed

_GAP_S = 0.001
"""Least seconds between two events of a stream, times the number of open streams: the cost of events per second then
does not grow with the number of streams."""

_SLICE_S = 0.004
"""Seconds for which messages of a worker are handled before the event loop does other work."""
_UNREAD = 256
"""Most tokens of one completion of a stream that wait for its reader; then the request leaves the batch until they are
read."""
_PER_PREEMPTION = 16
"""A completion is preempted once it has drawn a token for each so many of its context, which is computed anew when it
comes back."""

_NO_CALL = -1  # in place of a call's number


class Deadline:
    """The time limit of a request, which starts when the object is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, time.monotonic()

    def spent(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self._seconds - self.spent()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Context manager that cancels its body when the time is up.

        Raises:
            ApiError: the time is up (504).
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
    """A request to a worker, with the tokens that have arrived and are not read yet; iterating waits for new ones.

    Args:
        live: tokens are read as they arrive, not only at the end.
        on_end: called when the worker is done with the request, which may be before all tokens are read.
    """

    def __init__(self, uid: int, *, live: bool = False, on_end: Callable[[], None] = lambda: None) -> None:
        self.uid, self.live, self.on_end = uid, live, on_end
        self.answer: Any = None
        self.heard = False
        """Whether the reader has been woken for the first tokens."""
        self.on_read: Callable[[], None] | None = None
        """Called once when what has arrived is read."""
        self._chunks: dict[int, Chunk] = {}
        self._news, self._ended = asyncio.Event(), False
        self._failure: ApiError | None = None

    def add(self, index: int, *drawn: Any) -> int:
        """Adds a token of a completion; returns how many of it wait for the reader."""
        if index not in self._chunks:
            self._chunks[index] = Chunk(index)
        self._chunks[index].add(*drawn)
        return len(self._chunks[index].drawn)

    def wake(self) -> None:
        """Lets the reader take the tokens that have arrived."""
        self.heard = True
        self._news.set()

    def end(self, failure: ApiError | None = None) -> None:
        """Marks the call as ended, with the error to raise after the remaining tokens, if any."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._news.set()

    async def result(self) -> Any:
        """The answer of a request that draws no completions."""
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
                if self.on_read is not None:
                    on_read, self.on_read = self.on_read, None
                    on_read()
                return chunks
            if self._ended:
                raise self._failure or StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class Drawing:
    """The completions of one request: which of them are in the worker's batch, and what they have drawn.

    Completions leave the batch when others need their places, or when nobody reads them, and come back later: they go
    on where they were, because their tokens depend on their keys only.
    """

    def __init__(self, call: Call, job: Generate, send: Callable[[int, Any], None]) -> None:
        self.call, self._job, self._send = call, job, send
        self.left = set(range(len(job.keys)))
        """Indices of the completions that are not finished."""
        self.idle = list(range(len(job.keys)))
        """Indices of those that wait for a place."""
        self.rows: dict[int, int] = {}
        """Sequences in the worker's batch, by index."""
        self._drawn: list[list[int]] = [[] for _ in job.keys]
        self._stays: dict[int, int] = {}  # number of the stay, by index, of those that have a place
        self._new_stay = count()
        self._since_joined = 0  # tokens

    def join(self, places: int) -> None:
        """Sends some of the idle completions to the worker, those together that have not begun."""
        mine, self.idle = self.idle[:places], self.idle[places:]
        begun = [i for i in mine if self._drawn[i]]
        parts = [[i for i in mine if not self._drawn[i]], *([i] for i in begun)]
        for part in filter(None, parts):
            stay = next(self._new_stay)
            self._stays.update(dict.fromkeys(part, stay))
            keys, drawn = [self._job.keys[i] for i in part], tuple(self._drawn[part[0]])
            self._send(self.call.uid, replace(self._job, keys=keys, stay=stay, indices=tuple(part), drawn=drawn))
        self._since_joined = 0

    def preempt(self, places: int) -> list[int]:
        """Takes completions out of the batch for a while, those that have drawn least; returns their sequences."""
        mine = sorted(self._stays, key=lambda i: len(self._drawn[i]))[:places]
        self._send(self.call.uid, Cancel(frozenset(mine)))
        self.idle += mine
        for i in mine:
            del self._stays[i]
        return [self.rows.pop(i) for i in mine if i in self.rows]

    def start(self, stay: int, indices: Sequence[int], sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Notes that a stay has begun; (sequence, index) of the completions that are still in it."""
        for i, sequence in zip(indices, sequences, strict=True):
            if self._stays.get(i) == stay:
                self.rows[i] = sequence
                yield sequence, i

    def add(self, index: int, token: int) -> None:
        self._drawn[index].append(token)
        self._since_joined += 1

    def finish(self, index: int) -> bool:
        """Notes that a completion is finished; whether it had a place."""
        self.left.discard(index)
        if index in self.idle:
            self.idle.remove(index)
        self.rows.pop(index, None)
        return self._stays.pop(index, None) is not None

    def may_preempt(self) -> bool:
        """Whether its last completion in the batch has drawn enough there for the cost of coming back."""
        longest = max((len(self._drawn[i]) for i in self._stays), default=0)
        return self._since_joined * _PER_PREEMPTION >= len(self._job.prompt_ids) + longest


class WorkerLine(asyncio.Protocol):
    """The connection to one worker process, through which routes send requests and read answers."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self._numbers, self._frames = count(), Frames()
        self._ended: Callable[[], ApiError] | None = None  # why no more answers will come
        self._drawings: dict[int, tuple[Drawing, Turn, Places]] = {}  # by call
        self._rows: dict[int, tuple[Drawing, int]] = {}  # by sequence: whose, and the index of its completion
        self._streams = 0
        self._unread: set[Call] = set()  # streams with tokens for which their reader has not been woken
        self._told_at = 0.0
        self._telling: asyncio.TimerHandle | None = None

    @contextmanager
    def ask(self, payload: Any, *, deadline: Deadline, on_end: Callable[[], None] = lambda: None) -> Iterator[Call]:
        """Sends ``payload`` and yields its :class:`Call`; leaving the context early cancels the work.

        Raises:
            ApiError: the worker is lost or the server is ending (503); while reading also: the worker refuses (400) or
                fails (500), or the deadline has passed (504).
        """
        with self._call(deadline, live=False, on_end=on_end) as call:
            self._send(call.uid, payload)
            yield call

    @contextmanager
    def draw(self, job: Generate, *, places: Places, deadline: Deadline, live: bool, bounded: bool) -> Iterator[Call]:
        """Lets the completions of a job join the batch as they get places, and yields their :class:`Call`; leaving the
        context early cancels them.

        Args:
            live: wake the reader as tokens arrive, not only at the end.
            bounded: raise ``QueueFull`` when too many requests wait.

        Raises:
            ApiError: see `ask`.
        """
        with self._call(deadline, live=live) as call:
            drawing = Drawing(call, job, self._send)
            turn = Turn(
                wants=len(job.keys),
                give=drawing.join,
                preempt=lambda count: self._forget_rows(drawing.preempt(count)),
                may_preempt=drawing.may_preempt,
                refuse=lambda error: self._fail(call, error),
                evaluation=job.evaluation,
            )
            call.on_end = partial(places.leave, turn)
            self._drawings[call.uid] = drawing, turn, places
            places.enter(turn, bounded=bounded)
            yield call

    @contextmanager
    def _call(self, deadline: Deadline, *, live: bool, on_end: Callable[[], None] = lambda: None) -> Iterator[Call]:
        if self._ended is not None:
            on_end()
            raise self._ended()
        call = Call(next(self._numbers), live=live, on_end=on_end)
        self.calls[call.uid] = call
        self._streams += live
        timer = asyncio.get_running_loop().call_later(deadline.left(), self._expire, call, deadline)
        try:
            yield call
        finally:
            timer.cancel()
            self._streams -= live
            self._cancel(call)

    def tell(self, message: Any) -> None:
        """Sends a message that the worker does not answer."""
        self._send(_NO_CALL, message)

    def stop(self, call: Call, indices: Set[int]) -> None:
        """Stops drawing the completions with these indices."""
        if call.uid not in self._drawings:
            return
        drawing, turn, places = self._drawings[call.uid]
        if indices := indices & drawing.left:
            self._send(call.uid, Cancel(frozenset(indices)))
            self._forget_rows([drawing.rows[i] for i in indices if i in drawing.rows])
            self._finish(drawing, turn, places, indices)

    def _finish(self, drawing: Drawing, turn: Turn, places: Places, indices: Iterable[int]) -> None:
        """Gives back the places of completions that are finished, and ends the call after the last one."""
        held = sum([drawing.finish(i) for i in indices])
        if not drawing.left:
            self._close(drawing.call)
            drawing.call.end()
        else:
            turn.wants = 0 if drawing.call.on_read is not None else len(drawing.idle)
            places.give_back(turn, held)

    def _pause(self, drawing: Drawing, turn: Turn, places: Places) -> None:
        """Takes a stream out of the batch until its reader has read."""
        self._forget_rows(drawing.preempt(turn.has))
        drawing.call.on_read = lambda: places.want(turn, len(drawing.idle))
        turn.wants = 0
        places.give_back(turn, turn.has)

    def _forget_rows(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self._rows.pop(sequence, None)

    def fail_all(self, reason: Callable[[], ApiError]) -> None:
        """Ends all calls with ``reason()`` as their error, and refuses later ones with it."""
        self._ended = reason
        for call in list(self.calls.values()):
            self._close(call)
            call.end(reason())

    def _expire(self, call: Call, deadline: Deadline) -> None:
        """Ends a call when its time is up, also if nobody reads it: a client that stopped reading would keep places."""
        self._fail(call, deadline.passed())

    def _fail(self, call: Call, error: ApiError) -> None:
        self._cancel(call)
        call.end(error)

    def _cancel(self, call: Call) -> None:
        if call.uid in self.calls:
            self._send(call.uid, Cancel())  # before its places are given to others
            self._close(call)

    def _close(self, call: Call) -> None:
        """Forgets a call that the worker is done with and calls its ``on_end``."""
        del self.calls[call.uid]
        if (held := self._drawings.pop(call.uid, None)) is not None:
            self._forget_rows(held[0].rows.values())
        call.on_read = None
        self._unread.discard(call)
        call.on_end()

    def _send(self, uid: int, payload: Any) -> None:
        if self._ended is None:
            self._transport.write(packed((uid, payload)))

    # --- messages of the worker -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        until = time.monotonic() + _SLICE_S
        for message in self._frames.feed(data):
            self._take(message)
            if time.monotonic() > until:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._read_on)
                break

    def _read_on(self) -> None:
        """Handles the messages that were left, one more turn of the event loop later."""
        self._transport.resume_reading()
        self.data_received(b"")

    def _take(self, message: Any) -> None:
        if isinstance(message, Step):
            self._hand_out(message.columns)
        elif (call := self.calls.get(message.uid)) is None:
            pass  # cancelled meanwhile
        elif isinstance(message, Started):
            drawing = self._drawings[message.uid][0]
            for sequence, i in drawing.start(message.stay, message.indices, message.sequences):
                self._rows[sequence] = drawing, i
        else:
            if message.uid in self._drawings:  # others of its completions may go on
                self._send(message.uid, Cancel())
            self._close(call)
            if isinstance(message, Answer):
                call.answer = message.data
                call.end()
            elif isinstance(message.reason, Refusal):
                call.end(bad_request(message.reason.message, param=message.reason.param, code=message.reason.code))
            else:
                call.end(ApiError(500, message.reason, code="worker_error"))

    def _hand_out(self, columns: Sequence[tuple[Any, ...]]) -> None:
        finished: dict[int, list[int]] = {}
        behind: set[int] = set()
        for sequence, token, logprob, top, finish in zip(*columns, strict=True):
            if sequence not in self._rows:
                continue  # cancelled meanwhile
            drawing, i = self._rows[sequence]
            call = drawing.call
            drawing.add(i, token)
            if call.add(i, token, logprob, top, finish) >= _UNREAD and call.live:
                behind.add(call.uid)
            if finish is not None:
                del self._rows[sequence]
                finished.setdefault(call.uid, []).append(i)
            if call.live and call.heard:
                self._unread.add(call)
            elif call.live:
                call.wake()
        for uid, indices in finished.items():
            self._finish(*self._drawings[uid], indices)
        for uid in behind & self._drawings.keys():
            self._pause(*self._drawings[uid])
        if self._unread and self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(self._told_at + _GAP_S * self._streams, self._tell)

    def _tell(self) -> None:
        self._telling, self._told_at = None, asyncio.get_running_loop().time()
        for call in self._unread:
            call.wake()
        self._unread.clear()


class Generator:
    """Draws completions with the worker that holds the model."""

    def __init__(self, *, max_batch_size: int, max_queue: int) -> None:
        self.line = WorkerLine()
        self.places = Places(max_batch_size, max_waiting=max_queue)

    async def generate(
        self, job: Generate, *, live: bool, deadline: Deadline, bounded: bool, stopped: Set[int] = frozenset()
    ) -> AsyncGenerator[list[Chunk], None]:
        """Draws one completion per key, each as soon as it gets a place.

        Args:
            live: yield tokens as they arrive, not all at the end.
            bounded: raise ``QueueFull`` when the queue is full, instead of waiting.
            stopped: set to which the caller adds the indices of completions that are to be stopped.
        """
        with self.line.draw(job, places=self.places, deadline=deadline, live=live, bounded=bounded) as call:
            async for chunks in call:
                yield chunks
                if stopped:
                    self.line.stop(call, stopped)

    async def score_prompt(self, job: ScorePrompt, *, deadline: Deadline, bounded: bool) -> list[ScoredToken]:
        """The log-probabilities of a prompt's own tokens; waits for a place like a completion."""
        async with deadline.limit():
            place = await self.places.take(bounded=bounded)
        with self.line.ask(job, deadline=deadline, on_end=lambda: self.places.leave(place)) as call:
            return list(await call.result())


class Scorer:
    """Scores completions with the worker that holds the rewards."""

    def __init__(self, *, max_queue: int) -> None:
        self.line = WorkerLine()
        self._max_queue = max_queue
        self._asking = 0

    async def score(self, items: ScoreItems, *, deadline: Deadline, bounded: bool) -> list[Any]:
        """The worker's result for each item, in order.

        Raises:
            QueueFull: ``bounded``, and too many such requests are in progress.
            ApiError: see :meth:`WorkerLine.ask`.
        """
        if bounded and self._asking >= self._max_queue:
            raise QueueFull(self._asking)
        self._asking += bounded
        try:
            with self.line.ask(items, deadline=deadline) as call:
                return list(await call.result())
        finally:
            self._asking -= bounded
