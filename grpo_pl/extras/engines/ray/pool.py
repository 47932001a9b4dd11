"""``ActorPool``: actors on the nodes of a cluster, which draw a rollout in parts and replace each other."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Event
from typing import Any

import ray
from torch import Tensor

from grpo_pl.extras.agents.episodes import AnyRequest, EngineOutput
from grpo_pl.extras.engines.child.main import forget_secrets, portable, versions
from grpo_pl.extras.engines.child.player import Player
from grpo_pl.extras.engines.copy_engine import WeightsVersion
from grpo_pl.extras.engines.ray import cluster
from grpo_pl.rollout.decoding import join_rollouts
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted

log = logging.getLogger(__name__)

STUCK_S = 900.0  # after which an actor that draws nothing is ended
_POLL_S = 0.1
_PAUSE_S = 5.0  # after the memory monitor, which looks again soon
_CONTROL = "control"  # group of the calls that are answered while an actor draws


class EngineActor:
    """An engine's worker on a node. Restarted by Ray it would lack weights; errors are returned, as Ray prints them."""

    def __init__(self, worker: str, settings: dict[str, Any], required: dict[str, str]) -> None:
        forget_secrets()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        self._arguments, self._required = (worker, settings), required
        self._player: Player | None = None
        self._version: WeightsVersion | None = None  # of the weights that the worker has
        self._progress = (0, 0)
        self._newest: tuple[Any, ...] = ((-1, -1), [])

    def draw(self, request: AnyRequest, version: WeightsVersion, references: list[Any]) -> EngineOutput | Exception:
        """Draws from the weights ``version``, which are read if the worker has others."""
        try:
            if self._required != (here := versions()):
                what = f"the node {ray.util.get_node_ip_address()} has {here}, and this process {self._required}"
                raise ValueError(f"model.engine: {what}: install the same there.")
            self._player = self._player or Player(*self._arguments)
            if self._version != version:
                self._version = None
                self._player.worker.load(cluster.read_weights(references))
                self._version = version
            should_stop = ray.get_runtime_context().is_canceled
            return self._player.draw(
                request, progress=lambda *n: setattr(self, "_progress", n), should_stop=should_stop
            )
        except Exception as error:
            return portable(error)
        finally:
            self._progress = (0, 0)

    @ray.method(concurrency_group=_CONTROL)
    def status(self) -> tuple[str, tuple[int, int]]:
        """Address of the node; tokens drawn and completions finished in the present draw."""
        return ray.util.get_node_ip_address(), self._progress

    @ray.method(concurrency_group=_CONTROL)
    def newest_weights(self, *newer: Any) -> tuple[Any, ...]:
        """The newest version and its references, for the run's other ranks; the first rank sets them by ``newer``."""
        if newer and newer[0] > self._newest[0]:  # calls may run in another order than they were made
            self._newest = newer
        return self._newest


class ActorPool:
    """The actors of one rank. The first one may bear a ``name``, by which other ranks find where weights are."""

    def __init__(self, options: dict[str, Any], arguments: Any, actors: int, start_s: float, name: str | None) -> None:
        self._options = {**options, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        self._arguments, self._start_s, self._name = arguments, start_s, name
        self._version: WeightsVersion = (-1, -1)
        self._references: list[Any] = []  # of the weights
        self._status: list[tuple[str, tuple[int, int]]] = []  # by each actor: its node; tokens, completions
        self._stopped = Event()
        self._actors = [self._start_actor(place) for place in range(actors)]

    def put_weights(
        self, version: WeightsVersion, weights: Iterator[tuple[str, Tensor]], watch: Callable[[], None]
    ) -> None:
        """Has actors draw from new weights."""
        cluster.check_node()
        self._references = []  # so that the store need not hold both
        self._version, self._references = version, cluster.put_weights(weights, watch=watch)
        if self._name:
            self._actors[0].newest_weights.remote(version, self._references)

    def take_weights(self, name: str, version: WeightsVersion, watch: Callable[[], None]) -> bool:
        """The same with the weights that the first rank has put; false if it has newer ones, or none in time."""
        newest, deadline = (-1, -1), time.monotonic() + self._start_s
        while newest < version and time.monotonic() < deadline:
            watch()
            time.sleep(_POLL_S)
            with suppress(ValueError, ray.exceptions.RayError):  # it is not there yet
                first = ray.get_actor(name, cluster.NAMESPACE)
                newest, self._references = ray.get(first.newest_weights.remote(), timeout=_PAUSE_S)
        self._version = newest
        return newest == version

    def draw(self, request: AnyRequest, progress: ProgressFn | None, watch: Callable[[], None]) -> EngineOutput:
        """Draws as many prompts in each actor. An error of ``watch``, called again and again, ends the call."""
        parts: list[Any] = request.split(len(self._actors))
        self._stopped, self._status = Event(), [("", (0, 0)) for _ in self._actors]
        with ThreadPoolExecutor(len(parts), thread_name_prefix="grpo_pl-actors") as threads:
            under_way = set(drawing := [threads.submit(self._draw, *part) for part in enumerate(parts)])
            try:
                while under_way:
                    done, under_way = wait(under_way, _POLL_S, FIRST_COMPLETED)
                    for part in done:
                        part.result()  # raises what it failed by
                    if progress is not None:
                        progress(sum(done[0] for _, done in self._status), sum(done[1] for _, done in self._status))
                    cluster.check_node()
                    watch()
            finally:
                self._stopped.set()
        rollouts, episodes = zip(*(part.result() for part in drawing), strict=True)
        return join_rollouts(rollouts, request.pad_token_id), [episode for part in episodes for episode in part]

    def kill(self) -> None:
        self._stopped.set()
        for actor in filter(None, self._actors):
            ray.kill(actor)

    def _start_actor(self, place: int) -> Any:
        shared = {"name": self._name, "namespace": cluster.NAMESPACE} if self._name and place == 0 else {}
        kind = ray.remote(concurrency_groups={_CONTROL: 1}, **self._options, **shared)(EngineActor)
        while True:
            with suppress(ray.exceptions.ActorAlreadyExistsError):  # the dead one, until the head has let it go
                actor = kind.remote(*self._arguments)
                break
            if self._stopped.wait(_POLL_S):
                raise RolloutInterrupted
        if shared:
            actor.newest_weights.remote(self._version, self._references)
        return actor

    def _draw(self, place: int, part: AnyRequest) -> EngineOutput:
        """Draws a part in one actor, and if that dies, in one more."""
        deaths, deadline = 0, time.monotonic() + self._start_s
        while True:
            answer = self._actors[place].draw.remote(part, self._version, self._references)
            try:
                self._follow(place, answer)
                drawn: EngineOutput | Exception = ray.get(answer)
                break
            except ray.exceptions.RayError as error:
                line = f"the Ray actor on {self._status[place][0] or 'a node'} ended: {cluster.cause(error)}."
                # one that was placed on a node which was lost already does not count
                deaths += "never ran" not in line or time.monotonic() > deadline
            if self._stopped.is_set():
                raise RolloutInterrupted
            if deaths > 1:
                raise EngineDied(f"{line} It was the second in this part of a rollout; --resume goes on.", final=True)
            log.warning("%s Another draws its part of the rollout again.", line)
            self._status[place], self._actors[place] = ("", (0, 0)), None  # its name is taken as long as it is held
            self._actors[place] = self._start_actor(place)
            self._stopped.wait(_PAUSE_S if "memory monitor" in line else _POLL_S)
        if isinstance(drawn, Exception):
            raise drawn
        self._status[place] = "", (int(drawn[0].action_lengths.sum()), len(drawn[0].finish_reasons))
        return drawn

    def _follow(self, place: int, answer: Any) -> None:
        """Waits until an actor has drawn, and keeps its progress."""
        actor, changed_at = self._actors[place], time.monotonic()
        status = actor.status.remote()
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            if self._stopped.is_set():
                ray.cancel(answer)
                raise RolloutInterrupted
            if ray.wait([status], timeout=0)[0]:
                (node, done), status = ray.get(status), actor.status.remote()
                now = node, max(done, self._status[place][1])
                changed_at = changed_at if self._status[place] == now else time.monotonic()
                self._status[place] = now
            node, waited = self._status[place][0], time.monotonic() - changed_at
            if not node and waited > self._start_s:
                free = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "GPU", "memory")}
                what = f"after {self._start_s:g} s an actor had not begun; free in the Ray cluster are {free}"
                raise ValueError(f"model.engine: {what}: end what others have there, ask for less, or raise start_s.")
            if node and waited > STUCK_S:
                log.warning("the Ray actor on %s drew nothing for %g s.", node, STUCK_S)
                ray.kill(actor)  # and it is found dead
