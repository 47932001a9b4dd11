"""Slots of the batch: who has how many, who makes way for whom, and what is left when those who wait give up."""

import asyncio
from typing import Any

import pytest

from serve import admission
from serve.admission import AdmissionQueue, Claim, QueueFull
from serve.errors import ApiError
from tests.serve.bodies import on_a_loop


class Request:
    """Somebody who wants slots."""

    def __init__(self, wants: int, **options: Any) -> None:
        self.given: list[int] = []
        self.preempted: list[int] = []
        self.refused: list[ApiError] = []
        options = {"preempt": self.preempted.append, **options}
        self.claim = Claim(wants=wants, give=self.given.append, refuse=self.refused.append, **options)


def _entered(queue: AdmissionQueue, wants: int, *, bounded: bool = True, **options: Any) -> Request:
    request = Request(wants, **options)
    queue.enter(request.claim, bounded=bounded)
    return request


def _held(*requests: Request) -> list[int]:
    return [request.claim.has for request in requests]


@on_a_loop
async def test_one_alone_gets_all_and_makes_way_for_those_who_come() -> None:
    queue = AdmissionQueue(16, max_waiting=2)
    large = _entered(queue, 64)
    assert (large.given, queue.free) == ([16], 0)
    small = _entered(queue, 1)
    assert (_held(large, small), large.preempted) == ([15, 1], [1])
    other = _entered(queue, 64)
    assert _held(large, small, other) == [10, 1, 5]  # a third of the batch
    third = _entered(queue, 64)
    assert _held(large, small, other, third) == [6, 1, 5, 4]
    queue.leave(small.claim)
    assert _held(large, other, third) == [6, 5, 5]  # who has fewest
    queue.release({other.claim: 5})
    assert _held(large, other, third) == [6, 5, 5]
    queue.leave(other.claim)
    queue.leave(third.claim)
    assert (_held(large), queue.free, queue.waiting) == ([16], 0, 0)


@on_a_loop
async def test_when_all_have_one_slot_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_STAY_S", 0.05)
    queue = AdmissionQueue(2, max_waiting=9)
    first, second = (_entered(queue, 1) for _ in range(2))
    fixed = AdmissionQueue(2, max_waiting=9)
    stay = [await fixed.acquire(bounded=True) for _ in range(2)]
    waits = asyncio.ensure_future(fixed.acquire(bounded=True))
    third = _entered(queue, 1)
    assert (_held(first, second, third), queue.waiting) == ([1, 1, 0], 1)
    async with asyncio.timeout(20):
        while len(first.given) + len(second.given) + len(third.given) < 8:
            await asyncio.sleep(0.01)
    assert min(map(len, (first.given, second.given, third.given))) >= 2
    assert sum(_held(first, second, third)) == 2
    assert not waits.done()  # what takes a slot for good keeps it
    fixed.leave(stay[0])
    await waits
    for request in (first, second, third):
        queue.leave(request.claim)
    assert (queue.free, queue.waiting) == (2, 0)


@on_a_loop
async def test_who_has_just_come_back_is_not_moved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_STAY_S", 0.0)
    queue = AdmissionQueue(1, max_waiting=9)
    moves = False
    running = _entered(queue, 1, may_preempt=lambda: moves)
    newcomer = _entered(queue, 1)
    assert _held(running, newcomer) == [1, 0]
    moves = True
    queue.want(newcomer.claim, 1)
    assert _held(running, newcomer) == [0, 1]


@on_a_loop
async def test_evaluations_leave_most_slots_to_others() -> None:
    queue = AdmissionQueue(16, max_waiting=2)
    first = _entered(queue, 4, evaluation=True)
    more = [_entered(queue, 2, bounded=False, evaluation=True) for _ in range(50)]
    assert _held(first, *more) == [4, *[0] * 50]
    with pytest.raises(QueueFull):
        _entered(queue, 1, evaluation=True)
    chats = [_entered(queue, 6) for _ in range(2)]
    assert _held(*chats) == [6, 6]
    queue.leave(first.claim)
    assert _held(*more[:3]) == [2, 2, 0]
    for request in (*more, *chats):
        queue.leave(request.claim)
    assert (queue.free, queue.waiting) == (16, 0)


@on_a_loop
async def test_too_many_in_line_are_refused_and_those_who_began_go_on_at_the_end() -> None:
    queue = AdmissionQueue(2, max_waiting=1)
    running = [_entered(queue, 3), _entered(queue, 1)]
    waiting = _entered(queue, 1)
    with pytest.raises(QueueFull, match="1 requests wait"):
        _entered(queue, 1)
    unbounded = _entered(queue, 1, bounded=False)
    queue.close(lambda: ApiError(503, "ending", code="shutting_down"))
    assert [len(r.refused) for r in (*running, waiting, unbounded)] == [0, 0, 1, 1]
    with pytest.raises(ApiError, match="ending"):
        _entered(queue, 1)
    queue.leave(running[1].claim)
    assert _held(running[0]) == [2]
    queue.release({running[0].claim: 1})
    assert (running[0].given, running[0].claim.wants) == ([2, 1, 1], 0)


@on_a_loop
async def test_a_slot_given_to_one_who_gives_up_in_the_same_moment_comes_back() -> None:
    for cancelled_first in (True, False):
        queue = AdmissionQueue(1, max_waiting=9)
        held = await queue.acquire(bounded=True)
        waiting = [asyncio.ensure_future(queue.acquire(bounded=True)) for _ in range(2)]
        await asyncio.sleep(0)
        if cancelled_first:
            waiting[0].cancel()
        queue.leave(held)
        if not cancelled_first:
            waiting[0].cancel()
        queue.leave(await waiting[1])
        assert [task.cancelled() for task in waiting] == [True, False]
        assert (queue.free, queue.waiting) == (1, 0)
