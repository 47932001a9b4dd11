"""The front process's end of LitServe's queues: places in the batch, deadlines, cancelling, lost workers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from litserve.utils import LitAPIStatus, ResponseBufferItem

from grpo_pl.rollout.native.continuous import ScoredToken, SequenceOptions
from serve import generate_worker, score_worker
from serve.errors import ApiError, bad_request, worker_lost
from serve.generate_worker import Chunk, Generate, ScorePrompt
from serve.grammars import Grammar
from serve.worker import Refusal

if TYPE_CHECKING:
    from litserve import LitServer


class Deadline:
    """A point in time by which a request must be done."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return self._at - time.monotonic()

    def passed(self) -> ApiError:
        message = f"not finished within {self._seconds:g} s: ask for less at once, or later."
        return ApiError(504, message, code="deadline_exceeded")


class Inbox(deque[tuple[Any, str]]):
    """What LitServe fills with the answers to one request; hears of the last one even while nobody is reading."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        super().__init__()
        self.arrived = asyncio.Event()
        self.ended = False
        self._on_end = on_end

    def append(self, answer: Any) -> None:
        super().append(answer)
        if not self.ended and answer[1] in (LitAPIStatus.FINISH_STREAMING, LitAPIStatus.ERROR):
            self.ended = True
            self._on_end()

    def fail(self) -> None:
        if not self.ended:
            self.append((None, LitAPIStatus.ERROR))
            self.arrived.set()


class WorkerLine:
    """One worker process as the routes see it: ask, and read answers until the last one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.inboxes: dict[str, Inbox] = {}
        self._ended: Callable[[], ApiError] | None = None  # why nothing more comes

    def connect(self, server: LitServer) -> None:
        """Called once the server's queues exist."""
        self._server = server

    def fail_all(self, reason: Callable[[], ApiError]) -> None:
        """Everyone who waits for the worker hears now why no answer will come."""
        self._ended = reason
        for inbox in list(self.inboxes.values()):
            inbox.fail()

    async def ask(
        self,
        payload: Any,
        *,
        deadline: Deadline,
        cancel: Callable[[str], Any],
        steer: Callable[[str], Any] = lambda uid: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Any, None]:
        """Sends ``payload`` and yields the answers. Leaving early, however that happens, cancels the work.

        Args:
            cancel: the message that stops the work, from the request's id.
            steer: asked after every answer for a further message to the worker; None sends none.
            on_end: called when the worker is done with it, which may be before everything has been read.

        Raises:
            ApiError: refused (400), worker lost or server ending (503), its own failure (500), or too late (504).
        """
        if self._ended is not None:
            on_end()
            raise self._ended()
        uid, inbox = str(uuid.uuid4()), Inbox(on_end)
        self.inboxes[uid] = inbox
        self._server.response_buffer[uid] = ResponseBufferItem(event=inbox.arrived, response_queue=inbox)
        self._put(uid, payload)
        try:
            async for data in self._read(inbox, deadline):
                yield data
                if not inbox.ended and (message := steer(uid)) is not None:
                    self._put("", message)
        finally:
            del self.inboxes[uid]
            self._server.response_buffer.pop(uid, None)
            if not inbox.ended:
                self._put("", cancel(uid))
                inbox.ended = True
                on_end()

    async def _read(self, inbox: Inbox, deadline: Deadline) -> AsyncGenerator[Any, None]:
        while True:
            try:
                async with asyncio.timeout(deadline.left()):
                    await inbox.arrived.wait()
            except TimeoutError:
                raise deadline.passed() from None
            inbox.arrived.clear()
            while inbox:
                data, status = inbox.popleft()
                if status == LitAPIStatus.ERROR:
                    raise self._failure(data)
                yield data
                if status == LitAPIStatus.FINISH_STREAMING:
                    return

    def _failure(self, data: Any) -> ApiError:
        """What a worker's last words mean; none at all come from one that is gone."""
        if isinstance(data, Refusal):
            return bad_request(data.message, param=data.param, code=data.code)
        if data is not None:
            return ApiError(500, str(data), code="worker_error")
        return worker_lost() if self._ended is None else self._ended()

    def _put(self, uid: str, payload: Any) -> None:
        # LitServe's own message: (consumer, request, when, payload)
        consumer = self._server.app.response_queue_id
        self._server._get_request_queue(self._path).put((consumer, uid, time.monotonic(), payload))


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
        self._asked = 0
        self._closed: Callable[[], ApiError] | None = None
        self._lines: dict[bool, deque[_Turn]] = {False: deque(), True: deque()}  # evaluations apart

    @property
    def waiting(self) -> int:
        """Those in line, evaluations included."""
        return sum(not turn.given.cancelled() for line in self._lines.values() for turn in line)

    async def take(self, count: int, *, bounded: bool, evaluation: bool = False) -> None:
        """Waits for ``count`` places.

        Raises:
            QueueFull: ``bounded``, and the line is full.
            ApiError: closed.
        """
        assert count <= (self.share if evaluation else self.size)
        if self._closed is not None:
            raise self._closed()
        self._asked += 1
        line, turn = self._lines[evaluation], _Turn(self._asked, count, asyncio.get_running_loop().create_future())
        line.append(turn)
        self._serve_lines()
        if turn.given.done():
            return
        if bounded and len(line) > self._max_waiting:
            line.remove(turn)
            raise QueueFull(len(line))
        try:
            await turn.given
        except asyncio.CancelledError:
            if turn.given.done() and not turn.given.cancelled() and turn.given.exception() is None:
                self.give_back(count, evaluation=evaluation)
            else:
                if turn in line:
                    line.remove(turn)
                self._serve_lines()  # who stood behind it may fit
            raise

    def close(self, reason: Callable[[], ApiError]) -> None:
        """Refuses everyone in line and whoever comes; what has its places keeps them."""
        self._closed = reason
        for line in self._lines.values():
            while line:
                turn = line.popleft()
                if not turn.given.done():
                    turn.given.set_exception(reason())

    def give_back(self, count: int, *, evaluation: bool = False) -> None:
        self.free += count
        self._evaluating -= count if evaluation else 0
        self._serve_lines()

    def _serve_lines(self) -> None:
        while True:
            for line in self._lines.values():
                while line and line[0].given.cancelled():
                    line.popleft()
            heads = [(line[0].number, evaluation) for evaluation, line in self._lines.items() if line]
            heads = [(n, e) for n, e in heads if not e or self._evaluating + self._lines[e][0].places <= self.share]
            if not heads:
                return
            line = self._lines[evaluation := min(heads)[1]]
            if line[0].places > self.free:
                return
            turn = line.popleft()
            self.free -= turn.places
            self._evaluating += turn.places if evaluation else 0
            turn.given.set_result(None)


class _Turn(NamedTuple):
    number: int
    places: int
    given: asyncio.Future[None]


class Generator:
    """Completions from the worker that holds the model."""

    def __init__(self, path: str, *, max_batch_size: int, max_queue: int) -> None:
        self.line = WorkerLine(path)
        self.places = Places(max_batch_size, max_waiting=max_queue)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        keys: Sequence[int],
        options: SequenceOptions,
        *,
        live: bool,
        deadline: Deadline,
        bounded: bool = True,
        stopped: set[int] | None = None,
        grammar: Grammar | None = None,
        evaluation: bool = False,
    ) -> AsyncGenerator[list[Chunk], None]:
        """Draws one completion per key; more than fit in the batch are drawn in turns.

        Args:
            live: yield tokens as they come rather than all at the end.
            bounded: be refused when the queue is full, instead of waiting in it.
            stopped: the caller adds the indices of completions that it wants no more of.
            grammar: what the completions must match.
            evaluation: give way to others, see :class:`Places`.
        """
        size = self.places.share if evaluation else self.places.size
        for first in range(0, len(keys), size):
            job = Generate(list(prompt_ids), list(keys[first : first + size]), options, live, grammar, evaluation)
            steer = _stop_messages(set() if stopped is None else stopped, first, len(job.keys))
            async with aclosing(self._one_batch(job, deadline, steer, bounded=bounded)) as chunks:
                async for part in chunks:
                    for chunk in part:
                        chunk.index += first
                    yield part

    async def score_prompt(
        self, prompt_ids: Sequence[int], *, top: int, deadline: Deadline, bounded: bool
    ) -> list[ScoredToken]:
        """The log-probabilities of a prompt's own tokens, in turn with those who wait for a place."""
        await self._take(1, deadline, bounded=bounded)
        answers = self.line.ask(
            ScorePrompt(list(prompt_ids), top),
            deadline=deadline,
            cancel=lambda uid: generate_worker.Cancel(uid, []),
            on_end=lambda: self.places.give_back(1),
        )
        async with aclosing(answers):
            async for scored in answers:
                return list(scored)
        raise AssertionError("the last answer holds the tokens")

    async def _take(self, count: int, deadline: Deadline, *, bounded: bool, evaluation: bool = False) -> None:
        try:
            async with asyncio.timeout(deadline.left()):
                await self.places.take(count, bounded=bounded, evaluation=evaluation)
        except TimeoutError:
            raise deadline.passed() from None

    async def _one_batch(
        self, job: Generate, deadline: Deadline, steer: Callable[[str], Any], *, bounded: bool
    ) -> AsyncGenerator[list[Chunk], None]:
        count = len(job.keys)
        await self._take(count, deadline, bounded=bounded, evaluation=job.evaluation)

        def cancel(uid: str) -> generate_worker.Cancel:
            return generate_worker.Cancel(uid, list(range(count)))

        answers = self.line.ask(
            job,
            deadline=deadline,
            cancel=cancel,
            steer=steer,
            on_end=lambda: self.places.give_back(count, evaluation=job.evaluation),
        )
        async with aclosing(answers):
            async for chunks in answers:
                yield chunks


def _stop_messages(stopped: set[int], first: int, count: int) -> Callable[[str], generate_worker.Cancel | None]:
    """Tells the worker once about every completion that was added to ``stopped``."""
    told: set[int] = set()

    def steer(uid: str) -> generate_worker.Cancel | None:
        new = {i - first for i in stopped if first <= i < first + count} - told
        told.update(new)
        return generate_worker.Cancel(uid, sorted(new)) if new else None

    return steer


class Scorer:
    """Scores from the worker that holds the rewards."""

    def __init__(self, path: str, *, max_queue: int) -> None:
        self.line = WorkerLine(path)
        self._max_queue = max_queue
        self._asking = 0

    async def score(self, items: score_worker.ScoreItems, *, deadline: Deadline, bounded: bool = True) -> list[Any]:
        """What the worker says about each item, in order; ``bounded`` requests may be refused when many wait."""
        if not bounded:
            return await self._ask(items, deadline)
        if self._asking >= self._max_queue:
            raise QueueFull(self._asking)
        self._asking += 1
        try:
            return await self._ask(items, deadline)
        finally:
            self._asking -= 1

    async def _ask(self, items: score_worker.ScoreItems, deadline: Deadline) -> list[Any]:
        async with aclosing(self.line.ask(items, deadline=deadline, cancel=score_worker.Cancel)) as answers:
            async for answer in answers:
                return list(answer)
        raise AssertionError("the last answer holds the items")
