"""``Fleet``: the servers that draw for one rank, of which it asks each for a part of the prompts."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted
from grpo_pl.rollout.groups import join_rollouts
from grpo_pl.rollout.remote import wire
from grpo_pl.rollout.remote.client import EngineClient
from grpo_pl.rollout.remote.pushed_files import PushedFiles
from grpo_pl.types import GenerateRequest, Rollout

T = TypeVar("T")

FILE_BYTES = 2**30
"""Weights in one file; a larger tensor has one alone."""
_LOOK_EVERY_S = 0.05


class Fleet:
    """Servers whose leases one run holds; they hear from it until `close`, or until this object is gone.

    Args:
        session: the run's name for them.
        lease_s: for how long they wait to hear from it.
        who: this process among those of the run.
    """

    def __init__(self, servers: Sequence[EngineClient], session: str, lease_s: float, who: str) -> None:
        self.servers, self.session, self._who = servers, session, who
        over = threading.Event()
        for server in servers:  # each by itself, so that one that hangs costs the others nothing
            threading.Thread(target=_beat, args=(server, session, who, lease_s / 3, over), daemon=True).start()
        self._finalizer = weakref.finalize(self, _leave, os.getpid(), servers, session, over)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Ends the leases."""
        self._finalizer()

    def open(self, policy: dict[str, Any], mark: str | None, watch: Callable[[], None]) -> list[dict[str, Any]]:
        """What each server has; see `Seat.open`. Here and below, an error of ``watch`` ends the call."""
        stop = threading.Event()
        try:
            ask = (partial(server.open, self.session, policy, mark, self._who, stop.is_set) for server in self.servers)
            return together(list(ask), watch)
        finally:
            stop.set()

    def push(
        self,
        servers: Sequence[EngineClient],
        mark: str,
        weights: Iterator[tuple[str, Tensor]],
        watch: Callable[[], None],
    ) -> None:
        """Gives ``servers`` new weights, read once."""
        pipes = [_Pipe() for _ in servers]
        pushed = [
            started(partial(server.push, self.session, mark, iter(pipe)))
            for server, pipe in zip(servers, pipes, strict=True)
        ]
        try:
            for bucket in wire.weight_buckets(weights):
                frame = wire.framed(wire.packed(bucket))
                for pipe, push in zip(pipes, pushed, strict=True):
                    pipe.put(frame, push, watch)
            for pipe, push in zip(pipes, pushed, strict=True):
                pipe.put(wire.framed(b""), push, watch)
                pipe.put(None, push, watch)
            results(pushed, watch)
        except BaseException:
            for pipe in pipes:
                pipe.broken.set()
            raise

    def push_files(
        self,
        servers: Sequence[EngineClient],
        mark: str,
        weights: Iterator[tuple[str, Tensor]],
        folder: Path,
        watch: Callable[[], None],
    ) -> None:
        """The same by files in a folder that the servers see as well; they are removed afterwards."""
        with PushedFiles(folder, self.session, self._who) as files:
            for bucket in wire.weight_buckets(weights, FILE_BYTES):
                files.write(wire.packed(bucket))
                watch()
            push = [partial(server.push_files, self.session, mark, files.names) for server in servers]
            together(push, watch)

    def generate(
        self,
        mark: str,
        request: GenerateRequest,
        *,
        progress: ProgressFn | None,
        should_stop: Callable[[], bool] | None,
    ) -> Rollout:
        """Draws consecutive prompts on each server."""
        count, prompts = len(self.servers), len(request.prompt_ids)
        stop, told = threading.Event(), [(0, 0)] * count

        def draw(number: int, part: slice) -> Rollout:
            asked = replace(request, prompt_ids=request.prompt_ids[part], keys=request.keys[part])
            return self.servers[number].generate(
                self.session,
                mark,
                asked,
                progress=lambda *now: told.__setitem__(number, now),
                should_stop=stop.is_set,
            )

        def watch() -> None:
            if progress is not None:
                progress(sum(tokens for tokens, _ in told), sum(finished for _, finished in told))
            if should_stop is not None and should_stop():
                raise RolloutInterrupted

        ends = [prompts * number // count for number in range(count + 1)]
        parts = [slice(*pair) for pair in pairwise(ends)]
        try:
            asked = [partial(draw, number, part) for number, part in enumerate(parts) if part.start < part.stop]
            drawn = together(asked, watch)
        finally:
            stop.set()
        if progress is not None:
            watch()
        return drawn[0] if len(drawn) == 1 else join_rollouts(drawn, request.pad_token_id)


class _Pipe:
    """Frames on their way from the thread that gathers weights to one that sends them."""

    def __init__(self) -> None:
        self._frames: queue.Queue[bytes | None] = queue.Queue(1)
        self.broken = threading.Event()

    def put(self, frame: bytes | None, push: Future[None], watch: Callable[[], None]) -> None:
        """Waits for room; raises the error of a push that failed."""
        while not push.done():
            watch()
            with suppress(queue.Full):
                return self._frames.put(frame, timeout=_LOOK_EVERY_S)
        push.result()
        if frame is not None:
            raise EngineDied("the engine's server took less than the whole weights.")

    def __iter__(self) -> Iterator[bytes]:
        while not self.broken.is_set():
            with suppress(queue.Empty):
                frame = self._frames.get(timeout=_LOOK_EVERY_S)
                if frame is None:
                    return
                yield frame
        raise EngineDied("the push was broken off on this side.")


def started(task: Callable[[], T]) -> Future[T]:
    """A call in a thread of its own, which does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def results(futures: Sequence[Future[T]], watch: Callable[[], None] = lambda: None) -> list[T]:
    """What calls return, or the first error; ``watch`` is called meanwhile."""
    while True:
        done, waiting = wait(futures, timeout=_LOOK_EVERY_S, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if not waiting:
            return [future.result() for future in futures]
        watch()


def together(tasks: Sequence[Callable[[], T]], watch: Callable[[], None] = lambda: None) -> list[T]:
    """What calls in threads of their own return."""
    return results([started(task) for task in tasks], watch)


def _beat(server: EngineClient, session: str, who: str, every_s: float, over: threading.Event) -> None:
    """Training takes its time between rollouts; a server that is gone shows with the next."""
    while not over.wait(every_s):
        with suppress(RuntimeError, ValueError):  # EngineDied is one, and what a closed client says
            server.renew(session, who, max(1.0, every_s))


def _leave(owner: int, servers: Sequence[EngineClient], session: str, over: threading.Event) -> None:
    over.set()
    if os.getpid() == owner:  # a process that was forked from the owner has no say
        for server in servers:
            server.leave(session)
            server.close()
