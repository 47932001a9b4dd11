"""Places in the batch: who gets one when, and what is left when those in line give up. And the line to a worker."""

import asyncio
import socket
from typing import Any

import pytest

from serve.dispatch import Call, Deadline, Places, QueueFull, WorkerLine
from serve.errors import ApiError
from serve.generate_worker import Started, Step
from serve.worker import Cancel, Failure, Frames, packed


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


class Worker:
    """The other end of a line, by hand."""

    def __init__(self) -> None:
        self.line = WorkerLine()
        self._end, self._theirs = socket.socketpair()
        self._end.setblocking(False)
        self._frames = Frames()

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.line, sock=self._theirs)

    async def says(self, *messages: Any) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, b"".join(map(packed, messages)))
        await asyncio.sleep(0.05)

    async def hears(self) -> list[Any]:
        return list(self._frames.feed(await asyncio.get_running_loop().sock_recv(self._end, 1 << 16)))


def _step(*rows: tuple[int, int, str | None]) -> Step:
    sequences, tokens, finishes = zip(*rows, strict=True)
    return Step([sequences, tokens, (-0.5,) * len(rows), ((),) * len(rows), finishes])


async def _next(call: Call) -> list[tuple[int, list[int]]]:
    async with asyncio.timeout(20):
        return [(chunk.index, chunk.tokens) for chunk in await anext(call)]


def test_the_first_token_of_a_stream_comes_at_once_and_later_ones_together() -> None:
    async def scenario() -> None:
        worker, ended = Worker(), []
        await worker.connect()
        options: dict[str, Any] = {"deadline": Deadline(60), "completions": 2, "live": True}
        with worker.line.ask("draw", **options, on_end=lambda: ended.append(True)) as call:
            assert await worker.hears() == [(call.uid, "draw")]
            await worker.says(Started(call.uid, [4, 9]), _step((4, 11, None), (9, 12, None), (5, 99, None)))
            assert await _next(call) == [(0, [11]), (1, [12])]
            await worker.says(_step((4, 13, None), (9, 14, "stop")), _step((4, 15, None)))
            assert await _next(call) == [(0, [13, 15]), (1, [14])]
            worker.line.stop(call, {0, 1})  # of the second nothing more was to come
            assert await worker.hears() == [(call.uid, Cancel(frozenset({0})))]
            await worker.says(_step((4, 16, None)))
            assert ended == [True]
            with pytest.raises(StopAsyncIteration):
                await anext(call)
        assert not worker.line.calls

    asyncio.run(scenario())


def test_who_reads_only_at_the_end_is_woken_once() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.connect()
        with worker.line.ask("draw", deadline=Deadline(60), completions=1) as call:
            reading = asyncio.ensure_future(_next(call))
            await worker.says(Started(call.uid, [0]), _step((0, 1, None)), _step((0, 2, None)))
            assert not reading.done()
            await worker.says(_step((0, 3, "length")))
            assert await reading == [(0, [1, 2, 3])]

    asyncio.run(scenario())


def test_leaving_a_call_cancels_it_and_a_late_one_ends_with_its_reason() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.connect()
        with worker.line.ask("draw", deadline=Deadline(60), completions=1, live=True) as call:
            pass
        assert await worker.hears() == [(call.uid, "draw"), (call.uid, Cancel())]
        too_late = pytest.raises(ApiError, match="not finished within")
        with too_late, worker.line.ask("draw", deadline=Deadline(0.01), completions=1) as late:
            await _next(late)
        with worker.line.ask("score", deadline=Deadline(60)) as failing:
            await worker.says(Failure(failing.uid, "it broke"))
            with pytest.raises(ApiError, match="it broke"):
                await failing.result()
        worker.line.fail_all(lambda: ApiError(503, "gone", code="worker_lost"))
        with pytest.raises(ApiError, match="gone"), worker.line.ask("draw", deadline=Deadline(60)):
            pass

    asyncio.run(scenario())


def test_a_late_call_that_nobody_reads_is_cancelled_and_gives_its_place_back() -> None:
    async def scenario() -> None:
        worker, ended = Worker(), asyncio.Event()
        await worker.connect()
        with worker.line.ask("draw", deadline=Deadline(0.01), completions=1, live=True, on_end=ended.set) as call:
            async with asyncio.timeout(20):
                await ended.wait()
            assert await worker.hears() == [(call.uid, "draw"), (call.uid, Cancel())]
            await worker.says(Started(call.uid, [0]), _step((0, 1, None)))  # what was on its way is passed over
            with pytest.raises(ApiError, match="not finished within"):
                await _next(call)

    asyncio.run(scenario())
