"""Places in the batch: who gets one when, and what is left when those in line give up."""

import asyncio

import pytest

from serve.places import Places, QueueFull


def test_evaluations_leave_most_places_to_others() -> None:
    async def scenario() -> None:
        places = Places(16, max_waiting=2)
        await places.take(4, bounded=True, evaluation=True)
        more = [asyncio.ensure_future(places.take(2, bounded=False, evaluation=True)) for _ in range(50)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in more)
        await places.take(12, bounded=True)  # nobody waits behind an evaluation that is short of its share
        chats = [asyncio.ensure_future(places.take(1, bounded=True)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await places.take(1, bounded=True)
        with pytest.raises(QueueFull):
            await places.take(1, bounded=True, evaluation=True)
        places.give_back(2)  # a chat's
        await asyncio.sleep(0)
        assert all(chat.done() for chat in chats)
        places.give_back(2, evaluation=True)
        await asyncio.sleep(0)
        assert [task.done() for task in more[:2]] == [True, False]
        for task in more:
            task.cancel()
        await asyncio.gather(*more, return_exceptions=True)
        assert places.waiting == 0

    asyncio.run(scenario())


def test_a_large_request_is_not_overtaken() -> None:
    async def scenario() -> None:
        places = Places(4, max_waiting=9)
        await places.take(3, bounded=True)
        large = asyncio.ensure_future(places.take(4, bounded=True))
        await asyncio.sleep(0)
        small = asyncio.ensure_future(places.take(1, bounded=True))
        await asyncio.sleep(0)
        assert not small.done()
        large.cancel()
        await asyncio.sleep(0)
        await small
        assert places.free == 0

    asyncio.run(scenario())


def test_places_given_to_one_who_gives_up_in_the_same_moment_come_back() -> None:
    async def scenario() -> None:
        for cancelled_first in (True, False):
            places = Places(2, max_waiting=9)
            await places.take(2, bounded=True)
            waiting = [asyncio.ensure_future(places.take(1, bounded=True)) for _ in range(3)]
            await asyncio.sleep(0)
            if cancelled_first:
                waiting[0].cancel()
            places.give_back(1)
            if not cancelled_first:
                waiting[0].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [task.cancelled() for task in waiting] == [True, False, False]
            await waiting[1]
            places.give_back(1)
            await waiting[2]
            assert places.free == 0
            assert places.waiting == 0

    asyncio.run(scenario())
