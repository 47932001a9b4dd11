"""The client of a worker: what its readers get when, and calls that end early or late."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest

from grpo_pl.rollout.native.continuous import SequenceOptions
from grpo_pl.types import SamplingParams
from serve import worker_client
from serve.errors import ApiError
from serve.generate_worker import Generate, Started, Step
from serve.generator import GenerateCall, Generator
from serve.worker_channel import Answer, Cancel, Failure, Frames, packed
from serve.worker_client import Deadline
from tests.serve.bodies import on_a_loop


class Worker:
    """The other end of a connection, by hand."""

    def __init__(self, slots: int = 8) -> None:
        self.client = Generator(max_batch_size=slots, max_queue=1)
        self._end, self._theirs = socket.socketpair()
        self._end.setblocking(False)
        self._frames = Frames()

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self.client, sock=self._theirs)

    async def says(self, *messages: Any) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, b"".join(map(packed, messages)))
        await asyncio.sleep(0.05)

    async def hears(self) -> list[Any]:
        return list(self._frames.feed(await asyncio.get_running_loop().sock_recv(self._end, 1 << 16)))


def _step(*rows: tuple[int, int, str | None]) -> Step:
    sequences, tokens, finishes = zip(*rows, strict=True)
    return Step([sequences, [[token] for token in tokens], ([-0.5],) * len(rows), ([],) * len(rows), finishes])


async def _next(call: GenerateCall) -> list[tuple[int, list[int]]]:
    async with asyncio.timeout(20):
        return [(chunk.index, chunk.tokens) for chunk in await anext(call)]


def _job(n: int) -> Generate:
    return Generate([7, 8], list(range(100, 100 + n)), SequenceOptions(sampling=SamplingParams()))


def _stay(job: Generate, number: int, *indices: int, drawn: tuple[int, ...] = ()) -> Generate:
    """What the worker is sent when some completions join."""
    return replace(job, stay=number, indices=indices, keys=[job.keys[i] for i in indices], drawn=drawn)


@on_a_loop
async def test_the_first_token_of_a_stream_comes_at_once_and_later_ones_together() -> None:
    worker, job = Worker(), _job(2)
    await worker.connect()
    options: dict[str, Any] = {"deadline": Deadline(60), "live": True, "bounded": True}
    with worker.client.draw(job, **options) as call:
        assert await worker.hears() == [(call.uid, _stay(job, 0, 0, 1))]
        await worker.says(Started(call.uid, 0, (0, 1), [4, 9]), _step((4, 11, None), (9, 12, None), (5, 99, None)))
        assert await _next(call) == [(0, [11]), (1, [12])]
        await worker.says(_step((4, 13, None), (9, 14, "stop")), _step((4, 15, None)))
        assert await _next(call) == [(0, [13, 15]), (1, [14])]
        assert worker.client.slots.free == 7
        worker.client.stop(call, {0, 1})  # of the second nothing more was to come
        assert await worker.hears() == [(call.uid, Cancel(frozenset({0})))]
        await worker.says(_step((4, 16, None)))
        assert worker.client.slots.free == 8
        with pytest.raises(StopAsyncIteration):
            await anext(call)
    assert not worker.client.calls


@on_a_loop
async def test_who_reads_only_at_the_end_is_woken_once() -> None:
    worker = Worker()
    await worker.connect()
    options: dict[str, Any] = {"deadline": Deadline(60), "bounded": True}
    with worker.client.draw(_job(1), live=False, **options) as call:
        reading = asyncio.ensure_future(_next(call))
        await worker.says(Started(call.uid, 0, (0,), [0]), _step((0, 1, None)), _step((0, 2, None)))
        assert not reading.done()
        await worker.says(_step((0, 3, "length")))
        assert await reading == [(0, [1, 2, 3])]


@on_a_loop
async def test_preempted_completions_come_back_where_they_were() -> None:
    worker, large, small = Worker(2), _job(2), _job(1)
    await worker.connect()
    options: dict[str, Any] = {"deadline": Deadline(60), "live": False, "bounded": True}
    with worker.client.draw(large, **options) as call:
        await worker.hears()
        await worker.says(Started(call.uid, 0, (0, 1), [4, 5]), _step((4, 11, None), (5, 12, None)))
        await worker.says(_step((4, 13, None)))
        with worker.client.draw(small, **options) as other:
            assert await worker.hears() == [(call.uid, Cancel(frozenset({1}))), (other.uid, _stay(small, 0, 0))]
            await worker.says(_step((4, 14, None), (5, 99, None)))  # the second was drawn before it was told
        assert await worker.hears() == [(other.uid, Cancel()), (call.uid, _stay(large, 1, 1, drawn=(12,)))]
        await worker.says(Started(other.uid, 0, (0,), [6]), Started(call.uid, 1, (1,), [7]))  # the first is late
        await worker.says(_step((4, 15, "stop"), (5, 98, None), (6, 97, None), (7, 16, "stop")))
        assert await _next(call) == [(0, [11, 13, 14, 15]), (1, [12, 16])]


@on_a_loop
async def test_a_stream_that_nobody_reads_leaves_the_batch_until_somebody_does() -> None:
    worker, job = Worker(2), _job(1)
    await worker.connect()
    options: dict[str, Any] = {"deadline": Deadline(60), "live": True, "bounded": True}
    with worker.client.draw(job, **options) as call:
        await worker.hears()
        await worker.says(Started(call.uid, 0, (0,), [4]), *(_step((4, i, None)) for i in range(255)))
        assert worker.client.slots.free == 1
        await worker.says(*(_step((4, i, None)) for i in range(255, 300)))
        assert await worker.hears() == [(call.uid, Cancel(frozenset({0})))]
        assert (worker.client.slots.free, worker.client.slots.waiting) == (2, 0)
        assert await _next(call) == [(0, list(range(256)))]
        assert await worker.hears() == [(call.uid, _stay(job, 1, 0, drawn=tuple(range(256))))]
        assert worker.client.slots.free == 1
    assert worker.client.slots.free == 2


@on_a_loop
async def test_leaving_a_call_cancels_it_and_a_late_one_ends_with_its_reason() -> None:
    worker = Worker()
    await worker.connect()
    client, left = worker.client, asyncio.ensure_future(worker.client.ask("draw", deadline=Deadline(60)))
    assert await worker.hears() == [(0, "draw")]
    left.cancel()
    assert await worker.hears() == [(0, Cancel())]
    with pytest.raises(ApiError, match="not finished within"):
        await client.ask("draw", deadline=Deadline(0.01))
    failing = asyncio.ensure_future(client.ask("score", deadline=Deadline(60)))
    await worker.says(Answer(1, "late"), Failure(2, "it broke"))
    with pytest.raises(ApiError, match="it broke"):
        await failing
    answered = asyncio.ensure_future(client.ask("score", deadline=Deadline(60)))
    await worker.says(Answer(3, [1.0]))
    assert await answered == [1.0]
    client.fail_all(lambda: ApiError(503, "gone", code="worker_lost"))
    with pytest.raises(ApiError, match="gone"):
        await client.ask("draw", deadline=Deadline(60))
    assert not client.calls


@on_a_loop
async def test_a_late_call_that_nobody_reads_is_cancelled_and_gives_its_slot_back() -> None:
    worker, job = Worker(1), _job(1)
    await worker.connect()
    with worker.client.draw(job, deadline=Deadline(0.01), live=True, bounded=True) as call:
        async with asyncio.timeout(20):
            while not worker.client.slots.free:
                await asyncio.sleep(0.01)
        assert await worker.hears() == [(call.uid, _stay(job, 0, 0)), (call.uid, Cancel())]
        await worker.says(Started(call.uid, 0, (0,), [0]), _step((0, 1, None)))  # it was on its way: passed over
        with pytest.raises(ApiError, match="not finished within"):
            await _next(call)


@on_a_loop
async def test_others_have_their_turn_between_messages_that_came_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "_SLICE_S", -1.0)
    worker, job, turns = Worker(), _job(1), 0
    await worker.connect()
    with worker.client.draw(job, deadline=Deadline(60), live=False, bounded=True) as call:
        await worker.hears()
        loop, seen = asyncio.get_running_loop(), []

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        add = call.add
        monkeypatch.setattr(call, "add", lambda *drawn: seen.append(turns) or add(*drawn))
        turn()
        steps = [_step((4, token, "stop" if token == 9 else None)) for token in range(10)]
        await worker.says(Started(call.uid, 0, (0,), [4]), *steps)
        assert await _next(call) == [(0, list(range(10)))]
        assert len(seen) == len(set(seen)) == 10
