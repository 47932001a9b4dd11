"""``RemoteEngine``: rollouts by engines on other hosts, which ``grpo-pl engine`` starts."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_pl.functional.choices import check_at_least
from grpo_pl.rollout.child.outline import Outline
from grpo_pl.rollout.copying import CopyEngine, Snapshot
from grpo_pl.rollout.engine import EngineDied, ProgressFn, RolloutInterrupted
from grpo_pl.rollout.remote.client import EngineClient, GaveUp, InUse, Unreachable
from grpo_pl.rollout.remote.fleet import Fleet
from grpo_pl.rollout.remote.fleet import together as all_of
from grpo_pl.rollout.remote.settings import token_of
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
T = TypeVar("T")

_TRY_EVERY_S = 0.25
_LATE_S = 1.0
"""By so much one answer of a server may be later than another."""


@dataclass(kw_only=True)
class RemoteEngine(CopyEngine):
    """Draws on other hosts, from weights that are pushed to them: the samples of `NativeEngine`, up to near-ties.

    Rank r of W takes the servers r, r + W, r + 2 W … and has each draw as many of its prompts; with fewer servers than
    ranks it takes server r modulo their number, which draws for one rank after the other. A run has its servers alone
    until it ends, or has not been heard from for their lease.
    """

    urls: list[str]
    """Where the servers are, such as ``http://10.0.0.7:8001``; the same list on all ranks."""
    token_file: str | None = None
    """File with the servers' token; null takes it from the environment variable GRPO_PL_ENGINE_TOKEN."""
    ca_file: str | None = None
    """Certificates, in PEM form, that servers with ``https`` are trusted by; null takes those that are well known."""
    weights_folder: str | None = None
    """Folder through which weights are pushed, that the servers see as well; null sends them over HTTP."""
    reconnect_s: float = 120.0
    """Seconds for which a server that cannot be reached is asked again: at the start, and once in a rollout."""
    silence_s: float = 60.0
    """Seconds after which a server that says nothing counts as gone."""
    max_tokens: int | None = field(default=None, init=False)
    """Most tokens of a prompt and its completion together, as the servers say."""
    dtype: str | None = field(default=None, init=False)
    """Type in which the servers compute, as they say."""
    memory_bytes: ClassVar[int] = 0  # type: ignore[misc]  # here, at least
    keeps_top: ClassVar[bool] = True  # type: ignore[misc]
    _fleet: Fleet | None = field(default=None, init=False, repr=False, compare=False)
    _mark: str = field(default="", init=False, repr=False, compare=False)  # of the weights that were given last
    _session: str | None = field(default=None, init=False, repr=False, compare=False)  # the same on all ranks

    def __post_init__(self) -> None:
        check_at_least(0, "model.engine", reconnect_s=self.reconnect_s)
        check_at_least(1, "model.engine", silence_s=self.silence_s)
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"model.engine: urls must be one or more different addresses, got {self.urls}.")
        for url in self.urls:
            _check_url(url)
        for name in ("token_file", "ca_file"):
            if (file := getattr(self, name)) is not None and not Path(file).is_file():
                raise ValueError(f"model.engine: {name}: no such file: {file}.")
        if self.weights_folder is not None and not Path(self.weights_folder).is_dir():
            raise ValueError(f"model.engine: weights_folder: no such folder: {self.weights_folder}.")

    def check(self) -> None:
        """Asks every server what it runs."""
        servers = [self._server(url) for url in self.urls]
        if (open_urls := [url for url in self.urls if _is_readable_on_the_way(url)]) and token_of(self.token_file):
            log.warning(
                "the engine's token goes to %s unencrypted; see --ssl-certfile of grpo-pl engine.", open_urls[0]
            )
        try:
            self._learn(servers)
        finally:
            for server in servers:
                server.close()

    def describe(self) -> str:
        return f"{type(self).__name__} at {', '.join(self.urls)}, the policy's weights pushed {self.pushes} times"

    def prepare(self, model: PreTrainedModel) -> None:
        if self._session is None:
            self._session = _agreed(uuid.uuid4().hex, model.device)
        super().prepare(model)

    def snapshot(self, model: PreTrainedModel) -> Snapshot:
        """See `CopyEngine.snapshot`.

        Raises:
            ValueError: ranks share a server, on which each would find the weights of the other.
        """
        if _world() > len(self.urls):
            raise ValueError(
                f"rollouts that are drawn ahead need a server for each rank: give {_world()} urls, not "
                f"{len(self.urls)}, or set data.staleness to 0."
            )
        return super().snapshot(model)

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = self._session = None
        super().close()

    def _ask(
        self, request: GenerateRequest, progress: ProgressFn | None, should_stop: Callable[[], bool] | None
    ) -> Rollout:
        assert self._fleet is not None
        return self._fleet.generate(self._mark, request, progress=progress, should_stop=should_stop)

    def _give(
        self, policy: Outline, mark: tuple[int, int], weights: Iterator[tuple[str, Tensor]], *, together: bool
    ) -> None:
        self._give_named(policy, f"{mark[0]}.{mark[1]}", weights, together=together)

    def _give_named(self, policy: Outline, mark: str, weights: Iterator[tuple[str, Tensor]], *, together: bool) -> None:
        # of ranks that share a server, the first pushes a sharded policy; a whole one, whichever comes first
        gives = not together or _rank() < len(self.urls)
        if not gives:
            for _ in weights:
                pass
        described, self._mark = policy.to_json(), mark
        while True:
            fleet = self._connected()
            claim = partial(fleet.open, described, mark if gives else None, self._watch)
            states = self._patiently(claim) if gives else claim()
            if all(state["mark"] == mark for state in states):
                return
            if not any(state["busy"] for state in states):
                break
            self._watch()
            time.sleep(_TRY_EVERY_S)
        if not gives:
            raise EngineDied("the rank that was to push weights to the engine's server has not.")
        lacking = [server for server, state in zip(fleet.servers, states, strict=True) if state["push"]]
        if self.weights_folder is None:
            fleet.push(lacking, mark, weights, self._watch)
        else:
            fleet.push_files(lacking, mark, weights, Path(self.weights_folder), self._watch)

    def _watch(self) -> None:
        if self._should_stop is not None and self._should_stop():
            raise RolloutInterrupted

    # --- servers ----------------------------------------------------------------------------------------------------

    def _server(self, url: str) -> EngineClient:
        token = token_of(self.token_file)
        return EngineClient(url, token=token, ca_file=self.ca_file, silence_s=self.silence_s)

    def _connected(self) -> Fleet:
        if self._fleet is None or self._fleet.closed:
            urls = self.urls[_rank() :: _world()] or [self.urls[_rank() % len(self.urls)]]
            servers = [self._server(url) for url in urls]
            lease_s = self._learn(servers)
            self._session = self._session or uuid.uuid4().hex
            self._fleet = Fleet(servers, self._session, lease_s, str(_rank()))
        return self._fleet

    def _learn(self, servers: list[EngineClient]) -> float:
        """Takes over the limits of servers; returns the shortest lease.

        Raises:
            EngineDied: one cannot be reached.
            ValueError: one does not take the token, or reads no files though it is to.
        """
        abouts = self._patiently(lambda: all_of([server.about for server in servers], self._watch))
        for server, about in zip(servers, abouts, strict=True):
            if self.weights_folder is not None and not about["reads_files"]:
                raise ValueError(
                    f"the engine at {server.url} reads no files: start it with --weights-folder, or leave "
                    "model.engine.init_args.weights_folder out."
                )
        limits = [about["max_tokens"] for about in abouts if about["max_tokens"] is not None]
        self.max_tokens = min(limits, default=None)
        self.dtype = next((about["dtype"] for about in abouts if about["dtype"] not in (None, "float32")), None)
        return float(min(about["lease_s"] for about in abouts))

    def _patiently(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns once all servers can be reached and are free: a run that was killed holds them until
        its lease ends."""
        ends_at: dict[str, float] = {}
        deadline, told = time.monotonic() + self.reconnect_s, False
        while True:
            try:
                return ask()
            except Unreachable as death:
                if time.monotonic() > deadline:
                    raise GaveUp(f"{death} It was tried for {self.reconnect_s:g} s.") from death
                line = f"{death} It is tried again for {self.reconnect_s:g} s."
            except InUse as refused:
                end = time.monotonic() + refused.ends_in_s
                if end > ends_at.setdefault(refused.url, end) + _LATE_S:  # that run has been heard from
                    raise
                line = f"{refused} It is waited for at most {refused.ends_in_s:.0f} s."
            if not told:
                log.warning("%s", line)
                told = True
            self._watch()
            time.sleep(_TRY_EVERY_S)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another run to the servers."""
        return {**super().__getstate__(), "_fleet": None, "_session": None}


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        right = right and not (parts.query or parts.fragment)
        secret = "@" in parts.netloc
    except ValueError:  # brackets, or a port that is none
        right = secret = False
    if secret:  # it would stand in messages and in config.yaml
        raise ValueError("model.engine: urls holds a name or password before an @: give a token_file instead.")
    if not right:
        raise ValueError(f"model.engine: urls holds {url!r}: give http://HOST:PORT, or https.")


def _is_readable_on_the_way(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        local = False
    return parts.scheme == "http" and not local


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _agreed(mine: str, device: torch.device) -> str:
    """What the first rank says."""
    if _world() == 1:
        return mine
    told = [mine]
    dist.broadcast_object_list(told, src=0, device=device)
    return told[0]
