"""Places in the running batch: who gets one when, and who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from serve.errors import ApiError


class QueueFull(ApiError):
    """No place is free, and too many requests wait for one already (429)."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            429,
            f"{waiting} requests wait already; try again shortly.",
            code="queue_full",
            headers={"Retry-After": "1"},
        )


class Places:
    """Places in the running batch, given out first come, first served; a request gets all its places at once.

    Evaluations together hold at most ``share`` places, so that chats find free places however many evaluations run. A
    request is not held up by an evaluation before it that only waits for the share.
    """

    def __init__(self, size: int, *, max_waiting: int) -> None:
        self.size, self.free, self._max_waiting = size, size, max_waiting
        self.share = max(1, size // 4)
        self._evaluating = 0  # places that evaluations hold
        self._line: list[_Turn] = []
        self._closed: Callable[[], ApiError] | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that wait for places, evaluations included."""
        return sum(not turn.given.cancelled() for turn in self._line)

    async def take(self, count: int, *, bounded: bool, evaluation: bool = False) -> None:
        """Waits for ``count`` places.

        Raises:
            QueueFull: ``bounded``, and too many requests of this kind wait.
            ApiError: places have been closed.
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
                self._serve_line()  # requests behind it may fit now
            elif turn.given.exception() is None:
                self.give_back(count, evaluation=evaluation)
            raise

    def close(self, reason: Callable[[], ApiError]) -> None:
        """Refuses all waiting and all later requests with ``reason()``; those that have places keep them."""
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
