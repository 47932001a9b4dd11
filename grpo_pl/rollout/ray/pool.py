"""``ActorPool``: actors on the nodes of a cluster, which draw a rollout in parts and take each other's place."""

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

from grpo_pl.rollout.child.main import forget_secrets, portable, versions
from grpo_pl.rollout.child.player import Player
from grpo_pl.rollout.copying import Mark
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted
from grpo_pl.rollout.episodes import AnyRequest, EngineOutput
from grpo_pl.rollout.groups import join_rollouts
from grpo_pl.rollout.ray import cluster

log = logging.getLogger(__name__)

STUCK_S = 900.0  # in which an actor may draw nothing
_LOOK_EVERY_S = 0.1
_PAUSE_S = 5.0  # after the memory monitor, which looks again soon
_CONTROL = "control"  # group of the calls that are answered while an actor draws


class EngineActor:
    """An engine's worker on a node. Restarted by Ray it would lack weights; errors are returned, as Ray prints them."""

    def __init__(self, worker: str, settings: dict[str, Any], needed: dict[str, str]) -> None:
        forget_secrets()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        self._made_of, self._needed = (worker, settings), needed
        self._player: Player | None = None
        self._mark: Mark | None = None  # of the weights that the worker has
        self._told = (0, 0)
        self._held: tuple[Any, ...] = ((-1, -1), [])

    def draw(self, asked: AnyRequest, mark: Mark, references: list[Any]) -> EngineOutput | Exception:
        """Draws from the weights ``mark``, which are read where the worker has others."""
        try:
            if self._needed != (here := versions()):
                what = f"the node {ray.util.get_node_ip_address()} has {here}, and this process {self._needed}"
                raise ValueError(f"model.engine: {what}: install the same there.")
            self._player = self._player or Player(*self._made_of)
            if self._mark != mark:
                self._mark = None
                self._player.worker.load(cluster.read_weights(references))
                self._mark = mark
            should_stop = ray.get_runtime_context().is_canceled
            return self._player.draw(asked, progress=lambda *n: setattr(self, "_told", n), should_stop=should_stop)
        except Exception as error:
            return portable(error)
        finally:
            self._told = (0, 0)

    @ray.method(concurrency_group=_CONTROL)
    def status(self) -> tuple[str, tuple[int, int]]:
        """Address of the node; tokens drawn and completions finished in the present draw."""
        return ray.util.get_node_ip_address(), self._told

    @ray.method(concurrency_group=_CONTROL)
    def held(self, *newer: Any) -> tuple[Any, ...]:
        """What the run's other ranks ask for: the newest mark and its references, which the first rank gives."""
        if newer and newer[0] > self._held[0]:  # calls may run in another order than they were made
            self._held = newer
        return self._held


class ActorPool:
    """The actors of one rank. The first one may bear a ``name``, by which other ranks find where weights are."""

    def __init__(self, options: dict[str, Any], arguments: Any, actors: int, start_s: float, name: str | None) -> None:
        self._options = {**options, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        self._made_of, self._start_s, self._name = arguments, start_s, name
        self._mark: Mark = (-1, -1)
        self._references: list[Any] = []  # of the weights
        self._told: list[tuple[str, tuple[int, int]]] = []  # by each actor: its node; tokens, completions
        self._stopped = Event()
        self._actors = [self._started(place) for place in range(actors)]

    def put_weights(self, mark: Mark, weights: Iterator[tuple[str, Tensor]], watch: Callable[[], None]) -> None:
        """Has actors draw from new weights."""
        cluster.check_node()
        self._references = []  # so that the store need not hold both
        self._mark, self._references = mark, cluster.put_weights(weights, watch=watch)
        if self._name:
            self._actors[0].held.remote(mark, self._references)

    def take_weights(self, name: str, mark: Mark, watch: Callable[[], None]) -> bool:
        """The same with those that the first rank has put; false where it has newer ones, or none in time."""
        newest, deadline = (-1, -1), time.monotonic() + self._start_s
        while newest < mark and time.monotonic() < deadline:
            watch()
            time.sleep(_LOOK_EVERY_S)
            with suppress(ValueError, ray.exceptions.RayError):  # it is not there yet
                first = ray.get_actor(name, cluster.NAMESPACE)
                newest, self._references = ray.get(first.held.remote(), timeout=_PAUSE_S)
        self._mark = newest
        return newest == mark

    def draw(self, asked: AnyRequest, progress: ProgressFn | None, watch: Callable[[], None]) -> EngineOutput:
        """Draws as many prompts in each actor. An error of ``watch``, called again and again, ends the call."""
        parts: list[Any] = asked.split(len(self._actors))
        self._stopped, self._told = Event(), [("", (0, 0)) for _ in self._actors]
        with ThreadPoolExecutor(len(parts), thread_name_prefix="grpo_pl-actors") as threads:
            under_way = set(drawing := [threads.submit(self._draw, *part) for part in enumerate(parts)])
            try:
                while under_way:
                    done, under_way = wait(under_way, _LOOK_EVERY_S, FIRST_COMPLETED)
                    for part in done:
                        part.result()  # raises what it failed by
                    if progress is not None:
                        progress(sum(told[0] for _, told in self._told), sum(told[1] for _, told in self._told))
                    cluster.check_node()
                    watch()
            finally:
                self._stopped.set()
        rollouts, episodes = zip(*(part.result() for part in drawing), strict=True)
        return join_rollouts(rollouts, asked.pad_token_id), [episode for part in episodes for episode in part]

    def kill(self) -> None:
        self._stopped.set()
        for actor in filter(None, self._actors):
            ray.kill(actor)

    def _started(self, place: int) -> Any:
        shared = {"name": self._name, "namespace": cluster.NAMESPACE} if self._name and place == 0 else {}
        kind = ray.remote(concurrency_groups={_CONTROL: 1}, **self._options, **shared)(EngineActor)
        while True:
            with suppress(ray.exceptions.ActorAlreadyExistsError):  # the dead one, until the head has let it go
                actor = kind.remote(*self._made_of)
                break
            if self._stopped.wait(_LOOK_EVERY_S):
                raise RolloutInterrupted
        if shared:
            actor.held.remote(self._mark, self._references)
        return actor

    def _draw(self, place: int, part: AnyRequest) -> EngineOutput:
        """Draws a part in one actor, and where that dies, in one more."""
        deaths, deadline = 0, time.monotonic() + self._start_s
        while True:
            answer = self._actors[place].draw.remote(part, self._mark, self._references)
            try:
                self._follow(place, answer)
                drawn: EngineOutput | Exception = ray.get(answer)
                break
            except ray.exceptions.RayError as error:
                line = f"the Ray actor on {self._told[place][0] or 'a node'} ended: {cluster.cause(error)}."
                # one that was placed on a node which was lost already does not count
                deaths += "never ran" not in line or time.monotonic() > deadline
            if self._stopped.is_set():
                raise RolloutInterrupted
            if deaths > 1:
                raise EngineDied(f"{line} It was the second in this part of a rollout; --resume goes on.", final=True)
            log.warning("%s Another draws its part of the rollout again.", line)
            self._told[place], self._actors[place] = ("", (0, 0)), None  # its name is taken as long as it is held
            self._actors[place] = self._started(place)
            self._stopped.wait(_PAUSE_S if "memory monitor" in line else _LOOK_EVERY_S)
        if isinstance(drawn, Exception):
            raise drawn
        self._told[place] = "", (int(drawn[0].action_lengths.sum()), len(drawn[0].finish_reasons))
        return drawn

    def _follow(self, place: int, answer: Any) -> None:
        """Waits until an actor has drawn, and hears how far it is."""
        actor, heard = self._actors[place], time.monotonic()
        status = actor.status.remote()
        while not ray.wait([answer], timeout=_LOOK_EVERY_S)[0]:
            if self._stopped.is_set():
                ray.cancel(answer)
                raise RolloutInterrupted
            if ray.wait([status], timeout=0)[0]:
                (node, told), status = ray.get(status), actor.status.remote()
                now = node, max(told, self._told[place][1])
                heard = heard if self._told[place] == now else time.monotonic()
                self._told[place] = now
            node, waited = self._told[place][0], time.monotonic() - heard
            if not node and waited > self._start_s:
                free = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "GPU", "memory")}
                what = f"after {self._start_s:g} s an actor had not begun; free in the Ray cluster are {free}"
                raise ValueError(f"model.engine: {what}: end what others have there, ask for less, or raise start_s.")
            if node and waited > STUCK_S:
                log.warning("the Ray actor on %s drew nothing for %g s.", node, STUCK_S)
                ray.kill(actor)  # and it is found dead
