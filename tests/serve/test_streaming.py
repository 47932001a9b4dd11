"""Work of many requests on one event loop, in turns of a few milliseconds."""

import asyncio
import time

import pytest

from serve.streaming import TimeSlices
from tests.serve.bodies import on_a_loop


def _slowly(item: int) -> int:
    time.sleep(0.002)
    return -item


def test_the_event_loop_runs_others_between_the_items_of_many_requests() -> None:
    async def scenario() -> tuple[list[list[int]], float]:
        slices, longest, began = TimeSlices(), 0.0, time.monotonic()
        work = asyncio.gather(*(slices.map(_slowly, range(10 * i, 10 * i + 10)) for i in range(40)))
        while not work.done():
            before = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - before)
        assert time.monotonic() - began >= 0.8  # the sum of all work
        return await work, longest

    results, longest = asyncio.run(scenario())
    assert results == [[-item for item in range(10 * i, 10 * i + 10)] for i in range(40)]
    assert longest < 0.1  # one slice at a time; one of each request would be 0.2


@on_a_loop
async def test_a_request_that_fails_lets_the_next_one_pass() -> None:
    slices = TimeSlices()
    with pytest.raises(ZeroDivisionError):
        await slices.map(lambda item: 1 // item, [1, 0])
    assert await slices.map(lambda item: 1 // item, [1]) == [1]
    assert await slices.map(lambda item: item, []) == []
