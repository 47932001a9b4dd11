"""``OpenEnvEnvironment``: an environment behind an OpenEnv server, over HTTP."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_pl.environment import Environment, EnvironmentMistake, Observation, Step, Unavailable, resolved

_taken: set[str] = set()
_taking = threading.Lock()


@dataclass(kw_only=True)
class OpenEnvEnvironment(Environment):
    """``POST /reset {seed, episode_id}`` and ``POST /step {action}`` give ``{observation, reward, done}``.

    Over HTTP such a server holds one episode at a time. ``urls`` names as many as are to be played at once: an episode
    takes the first that is free, and gives it back when it ends. With several training processes, rank r of w takes
    every w-th of them, from the r-th on.
    """

    urls: Sequence[str]
    """Servers, such as ``http://localhost:8000``: as many as episodes at once, on all ranks together."""
    action: str | Callable[[str], Mapping[str, Any]] = "message"
    """The field of the action that the policy's text goes into, or ``package.module:function`` that makes the whole
    action of the text."""
    observe: str | Callable[[Mapping[str, Any]], Observation] | None = None
    """``observe(observation)`` gives the text of an observation; null takes its only text, or all of it as JSON."""
    timeout_s: float = 20.0
    """Seconds that a request may take."""
    isolation: Literal["thread", "process"] = "thread"
    """Only ``thread``: the server is a process already, and episodes in processes would not know which are taken."""

    def __post_init__(self) -> None:
        if isinstance(self.urls, str) or not self.urls:
            raise ValueError(f"urls must be a list of one address or more, got {self.urls!r}.")
        if self.isolation != "thread":
            raise ValueError(
                f"an OpenEnv server is a process already: isolation must be 'thread', not {self.isolation!r}."
            )
        self._observe = resolved(self.observe or plain_text)
        made = resolved(self.action) if callable(self.action) or ":" in self.action else None
        self._action = made or (lambda text: {self.action: text})
        self._url = ""

    def prepare(self) -> None:
        rank, world = _rank_and_world()
        if len(self.urls) < world:
            raise ValueError(f"urls names {len(self.urls)} servers for {world} training processes: each needs its own.")
        for url in self.urls[rank::world]:
            try:
                self._request(url, "/health")
            except Unavailable as error:
                raise ValueError(f"no OpenEnv server answers: {error}") from error

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        rank, world = _rank_and_world()
        ours = self.urls[rank::world]
        with _taking:
            free = [url for url in ours if url not in _taken]
            if not free:
                raise Unavailable(
                    f"all {len(ours)} servers are in use, each by an episode: name more of them in urls, or play "
                    "fewer episodes at once"
                )
            self._url = free[0]
            _taken.add(self._url)
        observation, *_ = self._result("/reset", {"seed": seed % 2**31, "episode_id": uuid.uuid4().hex})
        return observation, {}

    def step(self, action: str) -> Step:
        observation, reward, done = self._result("/step", {"action": self._action(action)})
        return observation, reward, done, False, {}

    def close(self) -> None:
        with _taking:
            _taken.discard(self._url)

    def _result(self, path: str, body: Mapping[str, Any]) -> tuple[Observation, float, bool]:
        reply = self._request(self._url, path, body)
        if not isinstance(reply, dict) or not isinstance(reply.get("observation"), dict):
            raise EnvironmentMistake(f"{self._url}{path} must answer with an observation, got {str(reply)[:80]!r}.")
        reward = reply.get("reward")
        return self._observe(reply["observation"]), 0.0 if reward is None else reward, bool(reply.get("done"))

    def _request(self, url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode(errors="replace")
            raise Unavailable(f"{url}{path} answered {error.code}: {detail}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{url}{path} cannot be reached: {error}") from error
        except ValueError as error:
            raise EnvironmentMistake(f"{url}{path} answered with what is no JSON.") from error


def _rank_and_world() -> tuple[int, int]:
    """Rank of this training process, and the number of them."""
    from torch import distributed

    here = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if here else (0, 1)


def plain_text(observation: Mapping[str, Any]) -> str:
    """The only text in an observation, or all of it as JSON."""
    texts = [value for key, value in observation.items() if isinstance(value, str) and key not in ("reward", "done")]
    return texts[0] if len(texts) == 1 else json.dumps(observation)
