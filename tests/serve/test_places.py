"""Places in the batch: who has how many, who makes way for whom, and what is left when those in line give up."""

import asyncio
from typing import Any

import pytest

from serve import places as module
from serve.errors import ApiError
from serve.places import Places, QueueFull, Turn


class Request:
    """Somebody who wants places."""

    def __init__(self, wants: int, **options: Any) -> None:
        self.given: list[int] = []
        self.preempted: list[int] = []
        self.refused: list[ApiError] = []
        options = {"preempt": self.preempted.append, **options}
        self.turn = Turn(wants=wants, give=self.given.append, refuse=self.refused.append, **options)


def _entered(places: Places, wants: int, *, bounded: bool = True, **options: Any) -> Request:
    request = Request(wants, **options)
    places.enter(request.turn, bounded=bounded)
    return request


def _held(*requests: Request) -> list[int]:
    return [request.turn.has for request in requests]


def test_one_alone_gets_all_and_makes_way_for_those_who_come() -> None:
    async def scenario() -> None:
        places = Places(16, max_waiting=2)
        large = _entered(places, 64)
        assert (large.given, places.free) == ([16], 0)
        small = _entered(places, 1)
        assert (_held(large, small), large.preempted) == ([15, 1], [1])
        other = _entered(places, 64)
        assert _held(large, small, other) == [10, 1, 5]  # a third of the batch
        third = _entered(places, 64)
        assert _held(large, small, other, third) == [6, 1, 5, 4]
        places.leave(small.turn)
        assert _held(large, other, third) == [6, 5, 5]  # who has fewest
        places.give_back(other.turn, 5)
        assert _held(large, other, third) == [6, 5, 5]
        places.leave(other.turn)
        places.leave(third.turn)
        assert (_held(large), places.free, places.waiting) == ([16], 0, 0)

    asyncio.run(scenario())


def test_when_all_have_one_place_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STAY_S", 0.05)

    async def scenario() -> None:
        places = Places(2, max_waiting=9)
        first, second = (_entered(places, 1) for _ in range(2))
        fixed = Places(2, max_waiting=9)
        stay = [await fixed.take(bounded=True) for _ in range(2)]
        waits = asyncio.ensure_future(fixed.take(bounded=True))
        third = _entered(places, 1)
        assert (_held(first, second, third), places.waiting) == ([1, 1, 0], 1)
        async with asyncio.timeout(20):
            while len(first.given) + len(second.given) + len(third.given) < 8:
                await asyncio.sleep(0.01)
        assert min(map(len, (first.given, second.given, third.given))) >= 2
        assert sum(_held(first, second, third)) == 2
        assert not waits.done()  # what takes a place for good keeps it
        fixed.leave(stay[0])
        await waits
        for request in (first, second, third):
            places.leave(request.turn)
        assert (places.free, places.waiting) == (2, 0)

    asyncio.run(scenario())


def test_who_has_just_come_back_is_not_moved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STAY_S", 0.0)

    async def scenario() -> None:
        places = Places(1, max_waiting=9)
        moves = False
        running = _entered(places, 1, may_preempt=lambda: moves)
        newcomer = _entered(places, 1)
        assert _held(running, newcomer) == [1, 0]
        moves = True
        places.want(newcomer.turn, 1)
        assert _held(running, newcomer) == [0, 1]

    asyncio.run(scenario())


def test_evaluations_leave_most_places_to_others() -> None:
    async def scenario() -> None:
        places = Places(16, max_waiting=2)
        first = _entered(places, 4, evaluation=True)
        more = [_entered(places, 2, bounded=False, evaluation=True) for _ in range(50)]
        assert _held(first, *more) == [4, *[0] * 50]
        with pytest.raises(QueueFull):
            _entered(places, 1, evaluation=True)
        chats = [_entered(places, 6) for _ in range(2)]
        assert _held(*chats) == [6, 6]
        places.leave(first.turn)
        assert _held(*more[:3]) == [2, 2, 0]
        for request in (*more, *chats):
            places.leave(request.turn)
        assert (places.free, places.waiting) == (16, 0)

    asyncio.run(scenario())


def test_too_many_in_line_are_refused_and_those_who_began_go_on_at_the_end() -> None:
    async def scenario() -> None:
        places = Places(2, max_waiting=1)
        running = [_entered(places, 3), _entered(places, 1)]
        waiting = _entered(places, 1)
        with pytest.raises(QueueFull, match="1 requests wait"):
            _entered(places, 1)
        unbounded = _entered(places, 1, bounded=False)
        places.close(lambda: ApiError(503, "ending", code="shutting_down"))
        assert [len(r.refused) for r in (*running, waiting, unbounded)] == [0, 0, 1, 1]
        with pytest.raises(ApiError, match="ending"):
            _entered(places, 1)
        places.leave(running[1].turn)
        assert _held(running[0]) == [2]
        places.give_back(running[0].turn, 1)
        assert (running[0].given, running[0].turn.wants) == ([2, 1, 1], 0)

    asyncio.run(scenario())


def test_a_place_given_to_one_who_gives_up_in_the_same_moment_comes_back() -> None:
    async def scenario() -> None:
        for cancelled_first in (True, False):
            places = Places(1, max_waiting=9)
            held = await places.take(bounded=True)
            waiting = [asyncio.ensure_future(places.take(bounded=True)) for _ in range(2)]
            await asyncio.sleep(0)
            if cancelled_first:
                waiting[0].cancel()
            places.leave(held)
            if not cancelled_first:
                waiting[0].cancel()
            places.leave(await waiting[1])
            assert [task.cancelled() for task in waiting] == [True, False]
            assert (places.free, places.waiting) == (1, 0)

    asyncio.run(scenario())
