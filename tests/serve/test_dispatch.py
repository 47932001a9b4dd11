"""The line to a worker: what its readers get when, and calls that end early or late."""

import asyncio
import socket
from typing import Any

import pytest

from serve.dispatch import Call, Deadline, WorkerLine
from serve.errors import ApiError
from serve.generate_worker import Started, Step
from serve.worker import Cancel, Failure, Frames, packed


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
