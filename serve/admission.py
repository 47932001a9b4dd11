"""``AdmissionQueue``: shares the slots of the running batch among requests, preempts some, and refuses too many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serve.errors import ApiError

_STAY_S = 0.5
"""Seconds after which the last slot of a request may go to one that has none."""
_AT_ONCE = 8
"""Most slots that others clear for a request that has none; it gets more as they become free."""


class QueueFull(ApiError):
    """No slot is free, and too many requests wait for one already (429)."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            429,
            f"{waiting} requests wait already; try again shortly.",
            code="queue_full",
            headers={"Retry-After": "1"},
        )


@dataclass(eq=False, kw_only=True)
class Claim:
    """The slots of one request, and how many more it wants."""

    wants: int
    give: Callable[[int], None]
    """Called with a number of slots that it has got."""
    preempt: Callable[[int], None] | None = None
    """Called with a number of slots that it has lost, and wants back; None if it cannot be preempted."""
    may_preempt: Callable[[], bool] = lambda: True
    """True once it has used its last slot enough to lose it for a while."""
    refuse: Callable[[ApiError], None]
    """Called when it will get no slot."""
    evaluation: bool = False
    has: int = 0
    began: bool = False
    """True if it has ever had a slot."""
    since: float = field(default_factory=time.monotonic)
    """When it last got a slot, or came."""


class AdmissionQueue:
    """Slots of the running batch, shared fairly among requests.

    Free slots go to the request that has fewest. When none is free, one that has none gets up to ``_AT_ONCE`` from the
    request that has most; when all have one, they take turns, newcomers first. Evaluations together hold at most
    ``share`` slots, so that chats find slots however many evaluations run.
    """

    def __init__(self, size: int, *, max_waiting: int) -> None:
        self.size, self.free, self._max_waiting = size, size, max_waiting
        self.share = max(1, size // 4)
        self._evaluating = 0  # slots that evaluations hold
        self._claims: dict[Claim, None] = {}  # in the order of arrival
        self._closed: Callable[[], ApiError] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that have no slot and wait for one, evaluations included."""
        return sum(claim.wants > 0 and not claim.has for claim in self._claims)

    def enter(self, claim: Claim, *, bounded: bool) -> None:
        """Adds a request.

        Raises:
            QueueFull: ``bounded``, and too many requests of this kind wait.
            ApiError: the queue has been closed.
        """
        if self._closed is not None:
            raise self._closed()
        self._claims[claim] = None
        self._balance()
        ahead = sum(c.wants > 0 and not c.has and c.evaluation == claim.evaluation for c in self._claims)
        if bounded and not claim.has and ahead > self._max_waiting:
            self.leave(claim)
            raise QueueFull(ahead - 1)

    def leave(self, claim: Claim) -> None:
        """Removes a request, which gives back its slots."""
        if claim in self._claims:
            del self._claims[claim]
            self.release({claim: claim.has})

    def release(self, counts: Mapping[Claim, int]) -> None:
        """Takes slots that requests have and do not need any more, all of them before others get any."""
        for claim, count in counts.items():
            self._move(claim, -count)
        self._balance()

    def want(self, claim: Claim, count: int) -> None:
        """Changes how many more slots a request wants."""
        claim.wants = count
        self._balance()

    async def acquire(self, *, bounded: bool) -> Claim:
        """Waits for one slot, which stays taken until `leave`.

        Raises:
            QueueFull: see `enter`.
            ApiError: the queue has been closed.
        """
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        claim = Claim(
            wants=1,
            give=lambda _: None if given.done() else given.set_result(None),
            refuse=lambda error: None if given.done() else given.set_exception(error),
        )
        self.enter(claim, bounded=bounded)
        try:
            await given
        except BaseException:
            self.leave(claim)
            raise
        return claim

    def close(self, reason: Callable[[], ApiError]) -> None:
        """Refuses with ``reason()`` all later requests and those that have had no slot yet; the others go on."""
        self._closed = reason
        for claim in [claim for claim in self._claims if not claim.began]:
            del self._claims[claim]
            claim.refuse(reason())

    def _move(self, claim: Claim, count: int) -> None:
        """Moves free slots to a request, or back for a negative count."""
        claim.has += count
        self.free -= count
        self._evaluating += count if claim.evaluation else 0

    def _grantable(self, claim: Claim) -> int:
        """The slots that a request may get, if they were free."""
        return min(claim.wants, self.share - self._evaluating) if claim.evaluation else claim.wants

    def _give(self, claim: Claim, count: int) -> None:
        self._move(claim, count)
        claim.wants -= count
        claim.began, claim.since = True, time.monotonic()
        claim.give(count)

    def _balance(self) -> None:
        """Gives out free slots, and preempts requests for those that have none."""
        fair = max(1, self.size // max(1, sum(claim.has + claim.wants > 0 for claim in self._claims)))
        while self.free and (hungry := [claim for claim in self._claims if self._grantable(claim) > 0]):
            claim = min(hungry, key=lambda c: (c.has, c.began, c.since))
            cap = self.size if claim.evaluation else max(1, fair - claim.has)
            self._give(claim, min(self._grantable(claim), self.free, cap))
        starving = [claim for claim in self._claims if not claim.has and self._grantable(claim) > 0]
        for claim in sorted(starving, key=lambda c: (c.began, c.since)):
            if (count := self._grantable(claim)) <= 0:
                continue
            if not (freed := self._preempt(min(count, fair, _AT_ONCE))):
                break
            self._give(claim, freed)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        can_preempt = any(claim.has and claim.preempt is not None for claim in self._claims)
        if can_preempt and any(not claim.has and self._grantable(claim) > 0 for claim in self._claims):
            self._timer = asyncio.get_running_loop().call_later(_STAY_S / 5, self._balance)

    def _preempt(self, count: int) -> int:
        """Frees up to ``count`` slots, or none; returns how many."""
        running = [claim for claim in self._claims if claim.has and claim.preempt is not None]
        claim = max(running, key=lambda claim: claim.has, default=None)
        if claim is None:
            return 0
        if claim.has > 1:
            count = min(count, claim.has // 2)
        else:
            ripe = [c for c in running if c.since <= time.monotonic() - _STAY_S and c.may_preempt()]
            if not ripe:
                return 0
            claim, count = min(ripe, key=lambda c: c.since), 1
        assert claim.preempt is not None
        self._move(claim, -count)
        claim.wants += count
        claim.since = time.monotonic()
        claim.preempt(count)
        return count
