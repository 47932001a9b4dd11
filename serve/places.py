"""Places in the running batch: who has how many, who gets the next one, who is preempted, and who is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serve.errors import ApiError

_STAY_S = 0.5
"""Seconds after which the last place of a request may go to one that has none."""
_AT_ONCE = 8
"""Most places that others clear for a request that has none; it gets more as they become free."""


class QueueFull(ApiError):
    """No place is free, and too many requests wait for one already (429)."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            429,
            f"{waiting} requests wait already; try again shortly.",
            code="queue_full",
            headers={"Retry-After": "1"},
        )


@dataclass(eq=False, kw_only=True)
class Turn:
    """The places of one request, and how many more it wants."""

    wants: int
    give: Callable[[int], None]
    """Called with a number of places that it has got."""
    preempt: Callable[[int], None] | None = None
    """Called with a number of places that it has lost, and wants back; None if it cannot be preempted."""
    may_preempt: Callable[[], bool] = lambda: True
    """Whether it has used its last place enough to lose it for a while."""
    refuse: Callable[[ApiError], None]
    """Called when it will get no place."""
    evaluation: bool = False
    has: int = 0
    began: bool = False
    """Whether it has ever had a place."""
    since: float = field(default_factory=time.monotonic)
    """When it last got a place, or came."""


class Places:
    """Places in the running batch, shared fairly among requests.

    Free places go to the request that has fewest. When none is free, one that has none gets up to ``_AT_ONCE`` from the
    request that has most; when all have one, they take turns, newcomers first. Evaluations together hold at most
    ``share`` places, so that chats find places however many evaluations run.
    """

    def __init__(self, size: int, *, max_waiting: int) -> None:
        self.size, self.free, self._max_waiting = size, size, max_waiting
        self.share = max(1, size // 4)
        self._evaluating = 0  # places that evaluations hold
        self._turns: dict[Turn, None] = {}  # in the order of arrival
        self._closed: Callable[[], ApiError] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that have no place and wait for one, evaluations included."""
        return sum(turn.wants > 0 and not turn.has for turn in self._turns)

    def enter(self, turn: Turn, *, bounded: bool) -> None:
        """Adds a request.

        Raises:
            QueueFull: ``bounded``, and too many requests of this kind wait.
            ApiError: places have been closed.
        """
        if self._closed is not None:
            raise self._closed()
        self._turns[turn] = None
        self._balance()
        ahead = sum(t.wants > 0 and not t.has and t.evaluation == turn.evaluation for t in self._turns)
        if bounded and not turn.has and ahead > self._max_waiting:
            self.leave(turn)
            raise QueueFull(ahead - 1)

    def leave(self, turn: Turn) -> None:
        """Removes a request, which gives back its places."""
        if turn in self._turns:
            del self._turns[turn]
            self._release(turn, turn.has)
            self._balance()

    def give_back(self, turn: Turn, count: int) -> None:
        """Takes places that a request has and does not need any more."""
        self._release(turn, count)
        self._balance()

    def want(self, turn: Turn, count: int) -> None:
        """Changes how many more places a request wants."""
        turn.wants = count
        self._balance()

    async def take(self, *, bounded: bool) -> Turn:
        """Waits for one place, which stays taken until `leave`.

        Raises:
            QueueFull: see `enter`.
            ApiError: places have been closed.
        """
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn = Turn(
            wants=1,
            give=lambda _: None if given.done() else given.set_result(None),
            refuse=lambda error: None if given.done() else given.set_exception(error),
        )
        self.enter(turn, bounded=bounded)
        try:
            await given
        except BaseException:
            self.leave(turn)
            raise
        return turn

    def close(self, reason: Callable[[], ApiError]) -> None:
        """Refuses with ``reason()`` all later requests and those that have had no place yet; the others go on."""
        self._closed = reason
        for turn in [turn for turn in self._turns if not turn.began]:
            del self._turns[turn]
            turn.refuse(reason())

    def _release(self, turn: Turn, count: int) -> None:
        turn.has -= count
        self.free += count
        self._evaluating -= count if turn.evaluation else 0

    def _room(self, turn: Turn) -> int:
        """The places that a request may get, if they were free."""
        return min(turn.wants, self.share - self._evaluating) if turn.evaluation else turn.wants

    def _give(self, turn: Turn, count: int) -> None:
        turn.wants -= count
        turn.has += count
        self.free -= count
        self._evaluating += count if turn.evaluation else 0
        turn.began, turn.since = True, time.monotonic()
        turn.give(count)

    def _take(self, turn: Turn, count: int) -> None:
        assert turn.preempt is not None
        self._release(turn, count)
        turn.wants += count
        turn.since = time.monotonic()
        turn.preempt(count)

    def _balance(self) -> None:
        """Gives out free places, and preempts requests for those that have none."""
        fair = max(1, self.size // max(1, sum(turn.has + turn.wants > 0 for turn in self._turns)))
        while self.free and (hungry := [turn for turn in self._turns if self._room(turn) > 0]):
            turn = min(hungry, key=lambda t: (t.has, t.began, t.since))
            cap = self.size if turn.evaluation else max(1, fair - turn.has)
            self._give(turn, min(self._room(turn), self.free, cap))
        starving = [turn for turn in self._turns if not turn.has and self._room(turn) > 0]
        for turn in sorted(starving, key=lambda t: (t.began, t.since)):
            if (room := self._room(turn)) <= 0:
                continue
            if not (count := self._preempt(min(room, fair, _AT_ONCE))):
                break
            self._give(turn, count)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        can_preempt = any(turn.has and turn.preempt is not None for turn in self._turns)
        if can_preempt and any(not turn.has and self._room(turn) > 0 for turn in self._turns):
            self._timer = asyncio.get_running_loop().call_later(_STAY_S / 5, self._balance)

    def _preempt(self, count: int) -> int:
        """Frees up to ``count`` places, or none; returns how many."""
        running = [turn for turn in self._turns if turn.has and turn.preempt is not None]
        most = max(running, key=lambda turn: turn.has, default=None)
        if most is None:
            return 0
        if most.has > 1:
            count = min(count, most.has // 2)
            self._take(most, count)
            return count
        ripe = [turn for turn in running if turn.since <= time.monotonic() - _STAY_S and turn.may_preempt()]
        if not ripe:
            return 0
        self._take(min(ripe, key=lambda turn: turn.since), 1)
        return 1
