"""Who may push and for how long, and how what a run left behind ends: the seat itself, with workers without a model."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_pl.rollout.child.outline import Outline
from grpo_pl.rollout.engine import EngineDied
from grpo_pl.rollout.remote import seat as seats
from grpo_pl.rollout.remote.seat import Arriving, Lost, Seat
from grpo_pl.rollout.remote.settings import ServerSettings

RUN, NEXT = "1" * 32, "2" * 32
MARK = "0.0"


@pytest.fixture
def run_seat(plugins: None, forked: None, build_model: Any) -> Iterator[Callable[..., None]]:
    """``run_seat(what, where="load")``: ``what(seat, policy)`` with a worker that comes to no end there."""
    import child_engines

    made: list[Seat] = []

    def run(what: Callable[[Seat, dict[str, Any]], Awaitable[None]], where: str = "") -> None:
        async def main() -> None:
            made.append(Seat(child_engines.StuckEngine(where=where), ServerSettings(lease_s=1000.0)))
            await asyncio.wait_for(what(made[-1], Outline.of(build_model("qwen2")).to_json()), 120)

        asyncio.run(main())

    yield run
    for seat in made:
        if seat._child is not None:
            seat._child.close()


class _Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def _weights(is_over: Callable[[], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(4)


async def _leaves(seat: Seat, work: Awaitable[Any]) -> None:
    """The lease ends in the middle of it."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(1.0)
    assert not task.done()  # it never is
    seat.leave(RUN)
    with pytest.raises(Lost):
        await task


def test_one_process_of_a_run_pushes_for_as_long_as_it_is_heard_from(run_seat: Any, monkeypatch: Any) -> None:
    clock = _Clock()
    monkeypatch.setattr(seats, "time", clock)

    async def what(seat: Seat, policy: dict[str, Any]) -> None:
        first = await seat.open(RUN, policy, MARK, "0")
        assert (first["push"], first["busy"], first["tokenizers"]) == (True, False, [])
        for _ in range(8):  # it gathers weights
            clock.now += 0.9 * seats.CLAIM_S
            seat.renew(RUN, "0")
            seat.renew(RUN, "1")
            second = await seat.open(RUN, policy, MARK, "1")
            assert (second["push"], second["busy"]) == (False, True)
        end = seat.begin_push(RUN)
        clock.now += 1.1 * seats.CLAIM_S
        assert (await seat.open(RUN, policy, None, "1"))["busy"]  # nothing of it has arrived yet
        with pytest.raises(Lost, match="another process of this run is pushing"):
            seat.begin_push(RUN)
        end()
        assert (await seat.open(RUN, policy, MARK, "1"))["push"]  # of the one that broke off nothing is waited for
        assert (await seat.open(RUN, policy, MARK, "1"))["push"]
        clock.now += 1.1 * seats.CLAIM_S
        assert (await seat.open(RUN, policy, MARK, "0"))["push"]

    run_seat(what)


def test_a_lease_that_ends_while_the_worker_starts_frees_the_seat(run_seat: Any, monkeypatch: Any) -> None:
    async def what(seat: Seat, policy: dict[str, Any]) -> None:
        await _leaves(seat, seat.open(RUN, policy, MARK, "0"))
        monkeypatch.setattr(seats, "START_S", 0.2)
        with pytest.raises(EngineDied, match=r"did not begin for 0\.2 s"):
            await seat.open(NEXT, policy, MARK, "0")

    run_seat(what, where="start")


def test_a_lease_that_ends_while_the_worker_takes_weights_frees_the_seat(run_seat: Any) -> None:
    async def what(seat: Seat, policy: dict[str, Any]) -> None:
        await seat.open(RUN, policy, MARK, "0")
        await _leaves(seat, seat.load(RUN, MARK, _weights))
        seat.claim(NEXT)
        assert not seat._lives() and not seat._lock.locked()

    run_seat(what, where="load")


def test_a_worker_that_draws_nothing_is_ended(run_seat: Any, monkeypatch: Any) -> None:
    async def what(seat: Seat, policy: dict[str, Any]) -> None:
        await seat.open(RUN, policy, MARK, "0")
        await seat.load(RUN, MARK, _weights)
        monkeypatch.setattr(seats, "STUCK_S", 0.5)
        monkeypatch.setattr("grpo_pl.rollout.child.process._STOPS_WITHIN_S", 0.5)
        with pytest.raises(EngineDied, match=r"drew nothing for 0\.5 s"):
            await seat.generate(RUN, MARK, {}, progress=lambda *now: None, stop=threading.Event())
        assert not seat._lives()

    run_seat(what, where="generate")


def test_a_push_that_is_late_or_breaks_off_is_lost_and_harms_nobody(run_seat: Any) -> None:
    async def what(seat: Seat, policy: dict[str, Any]) -> None:
        await seat.open(RUN, policy, MARK, "0")
        async with seat._lock:
            late = asyncio.ensure_future(seat.load(RUN, MARK, _weights))
            await asyncio.sleep(0)
            seat.leave(RUN)
            seat.claim(NEXT)
        with pytest.raises(Lost, match="lease of this run has ended"):
            await late
        assert seat._lives()
        arriving = Arriving()
        push = asyncio.ensure_future(seat.load(NEXT, MARK, arriving.read))
        await arriving.put({"a": torch.zeros(2)}, push)
        arriving.broken.set()
        with pytest.raises(Lost, match="broke off"):
            await push
        with pytest.raises(Lost, match="no whole weights"):
            await seat.generate(NEXT, MARK, {}, progress=lambda *now: None, stop=threading.Event())

    run_seat(what)


def test_a_server_that_ends_does_not_wait_for_a_worker_that_starts(run_seat: Any) -> None:
    async def what(seat: Seat, policy: dict[str, Any]) -> None:
        seat._ending = True  # after the last look at it, before the process is there
        with pytest.raises(RuntimeError):
            await seat.open(RUN, policy, MARK, "0")  # or the 120 s of all of them are over

    run_seat(what, where="start")
