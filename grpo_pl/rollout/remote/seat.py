"""``Seat``: the one place of an engine's server, which a run holds by a lease, with the worker and what it has."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor

from grpo_pl.policy.loading import choose_device, context_length
from grpo_pl.rollout.child.engine import ChildEngine
from grpo_pl.rollout.child.outline import Outline
from grpo_pl.rollout.child.process import ChildProcess
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted
from grpo_pl.rollout.remote.settings import ServerSettings
from grpo_pl.types import GenerateRequest, Rollout

log = logging.getLogger(__name__)

CLAIM_S = 30.0
"""So long after a process that was to push weights was last heard from, another of its run is to."""
START_S = 1800.0
"""Most seconds for the worker's process to be ready."""
STUCK_S = 900.0
"""Most seconds for the worker to take no weights, or to draw nothing."""
_LOOK_EVERY_S = 0.1


class NotYours(RuntimeError):
    """Another run has the engine."""

    def __init__(self, ends_in_s: float) -> None:
        super().__init__("another run has the engine; its lease ends when it does, or when it is not heard from.")
        self.ends_in_s = ends_in_s


class Lost(RuntimeError):
    """The engine does not have what the request needs, such as weights: they must be pushed again."""


@dataclass(eq=False)
class _Session:
    name: str
    ends_at: float
    over: threading.Event = field(default_factory=threading.Event)
    """Ends whatever is done for the run."""
    mark: str | None = None
    """Of the weights that arrived whole; None before, and while others arrive."""
    pushing: bool = False
    claimed_until: float = 0.0
    claimed_by: str = ""
    tokenizers: dict[str, Any] = field(default_factory=dict)


class Seat:
    """Used from one event loop; the worker is asked in threads, one exchange at a time.

    A run's worker is kept for the next run with a policy of the same outline, which has to push its own weights first.

    Args:
        engine: whose worker and settings are taken.
    """

    def __init__(self, engine: ChildEngine, settings: ServerSettings) -> None:
        self.engine, self.lease_s = engine, settings.lease_s
        self._most_weights = int(settings.max_weights_gib * 2**30)
        self._device = torch.device(choose_device("auto"))
        self._session: _Session | None = None
        self._child: ChildProcess | None = None
        self._outline: dict[str, Any] | None = None  # of the child
        self._config: Any = None
        self._lock = asyncio.Lock()
        self._ending = False

    # --- leases -----------------------------------------------------------------------------------------------------

    def claim(self, name: str) -> None:
        """Takes the place for a run, or renews its lease.

        Raises:
            NotYours: another run has it.
        """
        now = time.monotonic()
        self._look(now)
        if self._session is None:
            self._session = _Session(name, now)
            log.info("run %s has the engine.", name)
        if self._session.name != name:
            raise NotYours(self._session.ends_at - now)
        self._session.ends_at = now + self.lease_s

    def renew(self, name: str, who: str | None = None) -> None:
        """Hears from a run.

        Args:
            who: which of its processes; one that is to push weights takes its time to gather them.

        Raises:
            Lost: the place is not its own.
        """
        session, now = self._mine(name), time.monotonic()
        session.ends_at = now + self.lease_s
        if session.claimed_until > now and session.claimed_by == who:
            session.claimed_until = now + CLAIM_S

    def leave(self, name: str) -> None:
        """Ends a run's lease, and what is done for it."""
        if self._session is not None and self._session.name == name:
            self._session.over.set()
            self._session = None
            log.info("run %s has left the engine.", name)

    async def watch(self) -> None:
        """Ends leases that ran out."""
        while True:
            await asyncio.sleep(min(0.25, self.lease_s / 4))
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        if self._session is not None and self._session.ends_at < now:
            log.warning("run %s has not been heard from for %g s.", self._session.name, self.lease_s)
            self.leave(self._session.name)

    def _mine(self, name: str) -> _Session:
        if self._session is None or self._session.name != name:
            raise Lost("this run does not have the engine: its lease ended, or the server was started again.")
        return self._session

    def _check_lease(self, session: _Session) -> None:
        """After a wait."""
        if self._session is not session:
            raise Lost("the lease of this run has ended.")

    def _lives(self) -> bool:
        return self._child is not None and not self._child.closed

    # --- what a run asks for ----------------------------------------------------------------------------------------

    async def open(self, name: str, policy: dict[str, Any], mark: str | None, who: str) -> dict[str, Any]:
        """Makes the worker ready for a policy.

        Args:
            mark: of the weights that the caller can push; None for one that cannot.
            who: names the caller among the processes of the run.

        Returns:
            ``mark``, of the weights that are here; ``push``, whether the caller is to push now; ``busy``, whether
            another is doing it; ``tokenizers``, the names of those that are here.

        Raises:
            NotYours: another run has the engine.
            ValueError: the policy is none, or the engine cannot run it.
            EngineDied: the worker's process ended, or did not begin in time.
            Lost: the lease ended meanwhile.
        """
        self.claim(name)
        session = self._mine(name)
        if not self._lives() or self._outline != policy:
            async with self._lock:
                self._check_lease(session)
                if not self._lives() or self._outline != policy:
                    session.mark = None
                    await asyncio.to_thread(self._start, policy, session.over)
        self._check_lease(session)
        if not self._lives():  # it ended while this waited
            session.mark = None
        now = time.monotonic()
        busy = session.pushing or (session.claimed_until > now and session.claimed_by != who)
        push = mark is not None and session.mark != mark and not busy
        if push:
            session.claimed_until, session.claimed_by = now + CLAIM_S, who
        return {"mark": session.mark, "push": push, "busy": busy, "tokenizers": list(session.tokenizers)}

    def _start(self, policy: dict[str, Any], over: threading.Event) -> None:
        outline = Outline.from_json(policy, self._device)
        settings, environment = self.engine.settings(outline), self.engine.environment(outline)
        if self._child is not None:
            self._child.close()
        with _patience(START_S, "did not begin", over, lambda: self._ending) as patience:
            self._child = ChildProcess(
                self.engine.worker,
                settings,
                environment,
                most_weights=self._most_weights,
                should_stop=patience.is_over,
            )
        self._outline, self._config = policy, outline.config

    def limits(self, name: str) -> tuple[int, int]:
        """How many tokens the run's policy knows, and most tokens of a prompt and its completion.

        Raises:
            Lost: it has opened nothing yet.
        """
        self._mine(name)
        if self._config is None:
            raise Lost("there is no policy yet.")
        vocabulary = getattr(self._config.get_text_config(), "vocab_size", None) or 1 << 31
        return vocabulary, self.engine.max_tokens or context_length(self._config) or 1 << 20

    def begin_push(self, name: str) -> Callable[[], None]:
        """Has the run's other processes wait for a push, until what this returns is called.

        Raises:
            Lost: the place is not its own, or another of its processes is pushing.
        """
        session = self._mine(name)
        if session.pushing:
            raise Lost("another process of this run is pushing weights.")
        session.pushing = True

        def end() -> None:
            session.pushing, session.claimed_until = False, 0.0

        return end

    async def load(
        self, name: str, mark: str, weights: Callable[[Callable[[], bool]], Iterator[tuple[str, Tensor]]]
    ) -> None:
        """Gives the worker weights. Until all have arrived nothing can be drawn.

        Args:
            weights: makes the iterator that the worker's thread reads; it raises `Lost` once the function that it gets
                returns true.

        Raises:
            Lost: there is no worker for them, or the lease ended meanwhile.
            EngineDied, ValueError, RuntimeError: as `ChildProcess.load`.
        """
        session = self._mine(name)
        async with self._lock:
            self._check_lease(session)
            session.mark = None
            child = self._worker()
            with _patience(STUCK_S, "took no weights", session.over, lambda: self._ending) as patience:

                def told() -> Iterator[tuple[str, Tensor]]:
                    for weight in weights(patience.is_over):
                        yield weight
                        patience.renew()

                await asyncio.to_thread(child.load, told(), should_stop=patience.is_over)
            session.mark = mark

    async def generate(
        self,
        name: str,
        mark: str,
        request: GenerateRequest,
        *,
        progress: ProgressFn,
        stop: threading.Event,
    ) -> Rollout:
        """Draws.

        Raises:
            Lost: the worker does not have those weights.
            EngineDied, RolloutInterrupted, ValueError, RuntimeError: as `ChildProcess.ask`.
        """
        session = self._mine(name)
        async with self._lock:
            self._check_lease(session)
            if not self._lives():
                session.mark = None
            if session.mark != mark:
                has = "no whole weights" if session.mark is None else f"the weights {session.mark!r}"
                raise Lost(f"it has {has}, and was asked to draw from {mark!r}.")
            with _patience(STUCK_S, "drew nothing", session.over, stop.is_set) as patience:

                def told(tokens: int, finished: int) -> None:
                    patience.renew()
                    progress(tokens, finished)

                rollout: Rollout = await asyncio.to_thread(
                    self._worker().ask, "generate", request, progress=told, should_stop=patience.is_over
                )
            return rollout

    def keep_tokenizer(self, name: str, key: str, tokenizer: Any) -> None:
        """For stop strings of later requests; a run has one, or one after the other."""
        self._mine(name).tokenizers = {key: tokenizer}

    def tokenizer(self, name: str, key: str) -> Any:
        """The one that was kept.

        Raises:
            KeyError: there is none.
        """
        return self._mine(name).tokenizers[key]

    def _worker(self) -> ChildProcess:
        if self._child is None or self._child.closed:
            raise Lost("the engine's process has ended.")
        return self._child

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the worker's process, in whatever it is; threads that ask it notice its death."""
        self._ending = True
        if self._session is not None:
            self._session.over.set()
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                process.kill()


class _Patience:
    """How long something may take: until a run's lease is over, until told to stop, and no longer than so.

    Args:
        seconds: after which, unless it goes on, it counts as stuck.
    """

    def __init__(self, seconds: float, over: threading.Event, stopped: Callable[[], bool]) -> None:
        self._seconds, self._over, self._stopped = seconds, over, stopped
        self.renew()

    def renew(self) -> None:
        self._until = time.monotonic() + self._seconds

    def is_stuck(self) -> bool:
        return time.monotonic() > self._until

    def is_over(self) -> bool:
        return self._over.is_set() or self._stopped() or self.is_stuck()


@contextmanager
def _patience(seconds: float, what: str, over: threading.Event, stopped: Callable[[], bool]) -> Iterator[_Patience]:
    """An interruption by it becomes what the run is to be told."""
    patience = _Patience(seconds, over, stopped)
    try:
        yield patience
    except RolloutInterrupted:
        if stopped():
            raise
        if over.is_set():
            raise Lost("the lease of this run has ended.") from None
        raise EngineDied(f"the engine's process {what} for {seconds:g} s.") from None


class Arriving:
    """Weights on their way from the event loop to the thread that hands them to the worker."""

    def __init__(self) -> None:
        self._buckets: queue.Queue[dict[str, Tensor] | None] = queue.Queue(1)
        self.broken = threading.Event()
        """Set when no more will come, though not all have."""

    async def put(self, bucket: dict[str, Tensor] | None, push: asyncio.Task[None]) -> None:
        """Waits until there is room, or ``push`` is over; None is the end."""
        while not push.done():
            try:
                return self._buckets.put_nowait(bucket)
            except queue.Full:
                await asyncio.sleep(0.002)

    def read(self, is_over: Callable[[], bool]) -> Iterator[tuple[str, Tensor]]:
        """Raises `Lost` where they break off."""
        while True:
            try:
                bucket = self._buckets.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if self.broken.is_set() or is_over():
                    raise Lost("the push broke off.") from None
                continue
            if bucket is None:
                return
            yield from bucket.items()
