"""Front and worker in turn, under a clock of the test: whoever shares the batch, each request gets its own tokens."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.native.continuous import SequenceOptions, batch_of
from grpo_pl.rollout.native.decode_kernel import built_kernels
from grpo_pl.rollout.native.decoder_choice import TORCH
from grpo_pl.types import SamplingParams
from serve import admission, generate_worker, generator, worker_client
from serve.errors import ApiError
from serve.generate_worker import Generate, GenerateWorker
from serve.generator import Generator
from serve.worker_channel import Frames, FrontChannel, packed
from serve.worker_client import Deadline

SLOTS = 4
REQUESTS = 80


class Clock:
    """What the server knows of time, which passes with the work alone: between two turns, and in each step."""

    def __init__(self, chance: random.Random) -> None:
        self.now, self._chance = 0.0, chance

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += self._chance.choice([0.001, 0.004, 0.02])  # up to 16 tokens a step, or one
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Connection(FrontChannel):
    """The worker's connection, in place of a socket: the front has a turn whenever the worker looks for messages."""

    def __init__(self, client: Generator, clock: Clock, begin: Callable[[], bool]) -> None:
        self._client, self._clock, self._begin = client, clock, begin
        self._to_front, self._to_worker = bytearray(), Frames()
        self._written: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._loop.time = clock.monotonic  # type: ignore[method-assign]
        client.connection_made(self)  # type: ignore[arg-type]

    def send(self, message: Any) -> None:
        self._to_front += packed(message)

    def write(self, data: bytes) -> None:
        self._written += self._to_worker.feed(data)

    def take(self, *, wait_for_one: bool) -> list[tuple[int, Any]]:
        while True:
            self._clock.now += 0.1
            self._loop.run_until_complete(self._turn())
            if self._written or not wait_for_one:
                written, self._written = self._written, []
                return written

    async def _turn(self) -> None:
        if not self._begin():
            raise SystemExit(0)
        data, self._to_front = bytes(self._to_front), bytearray()
        self._client.data_received(data)
        for _ in range(8):  # for those who read
            await asyncio.sleep(0)
        assert 0 <= self._client.slots.free <= SLOTS

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def worker(export: Path, monkeypatch: pytest.MonkeyPatch) -> GenerateWorker:
    decoder = next(iter(built_kernels()), TORCH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else it sets the number of this process
    worker = GenerateWorker(replace(find_model(export), decoder=decoder), device="cpu", max_batch_size=SLOTS)
    worker.prepare()
    return worker


def _requests(chance: random.Random, vocabulary: int) -> Iterator[tuple[Generate, dict[str, Any]]]:
    """Short ones, many of the same length, and what their clients do."""
    for number in range(REQUESTS):
        sampling = SamplingParams(max_completion_length=chance.choice([1, 8, 8, 8, 24, 24, 40]))
        options = SequenceOptions(sampling=sampling, ignore_eos=chance.random() < 0.7)
        prompt = [chance.randrange(vocabulary) for _ in range(chance.randint(1, 12))]
        kind = chance.choices(["reads", "reads slowly", "hangs up", "stops one", "is wrong"], [12, 2, 2, 2, 1])[0]
        if kind == "is wrong":
            prompt[-1] = vocabulary
        keys = [1000 * number + i for i in range(chance.choice([1, 1, 1, 1, 2, 6]))]
        job = Generate(prompt, keys, options, evaluation=chance.random() < 0.1)
        yield job, {"kind": kind, "live": chance.random() < 0.8, "at": chance.uniform(0.0, 40.0)}


def _alone(worker: GenerateWorker, asked: Sequence[Generate]) -> list[list[list[int]]]:
    """What the completions of all jobs are in a batch with room for all of them, from which none has to go."""
    batch, drawn = batch_of(worker._served, worker._versions[0].policy, sum(len(job.keys) for job in asked)), {}
    sequences = [batch.add(job.prompt_ids, job.keys, job.options) for job in asked]
    while len(batch):
        for d in batch.step(16):
            drawn.setdefault(d.sequence, list[int]()).extend(d.tokens)
    return [[drawn[sequence] for sequence in own] for own in sequences]


@pytest.mark.parametrize("seed", range(3))
def test_each_request_gets_the_tokens_that_it_gets_alone(
    worker: GenerateWorker, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch that is always full: completions that end in the same step, requests that make way at any moment,
    readers that are slow, clients that hang up, and prompts that no policy could continue."""
    chance = random.Random(seed)
    clock = Clock(chance)
    for module in (admission, generate_worker, worker_client):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(generator, "_UNREAD", 6)
    client = Generator(max_batch_size=SLOTS, max_queue=1)
    vocabulary = worker._versions[0].policy.config.vocab_size
    asked = sorted(_requests(chance, vocabulary), key=lambda request: request[1]["at"])
    alone = iter(_alone(worker, [job for job, does in asked if does["kind"] != "is wrong"]))
    expected = [next(alone) if does["kind"] != "is wrong" else [] for _, does in asked]
    tasks: list[asyncio.Task[None]] = []

    async def ask(number: int) -> None:
        job, does = asked[number]
        got: dict[int, list[int]] = {i: [] for i in range(len(job.keys))}
        with client.draw(job, deadline=Deadline(1e6), live=does["live"], bounded=False) as call:
            async for chunks in call:
                for chunk in chunks:
                    got[chunk.index] += chunk.tokens
                if does["kind"] == "reads slowly":
                    await asyncio.sleep(0.7)
                elif does["kind"] == "hangs up" and len(got[0]) > 2:
                    return
                elif does["kind"] == "stops one" and 0 in call.left:
                    client.stop(call, {0})
        whole = list(got.values())
        first = 1 if does["kind"] == "stops one" else 0
        assert whole[first:] == expected[number][first:]
        assert whole[0] == expected[number][0][: len(whole[0])]

    def begin() -> bool:
        """Lets those begin who have come; false when all are done."""
        while len(tasks) < len(asked) and asked[len(tasks)][1]["at"] <= clock.now:
            tasks.append(asyncio.ensure_future(ask(len(tasks))))
        return len(tasks) < len(asked) or not all(task.done() for task in tasks)

    connection = Connection(client, clock, begin)
    with pytest.raises(SystemExit):
        worker.work(connection)
    connection.close()
    for (_, does), task in zip(asked, tasks, strict=True):
        error = task.exception()
        assert isinstance(error, ApiError) == (does["kind"] == "is wrong"), error
        assert error is None or isinstance(error, ApiError), error
    assert (client.slots.free, client.slots.waiting, client.calls) == (SLOTS, 0, {})
    assert (len(worker._versions[0].batch), worker._owners) == (0, {})
