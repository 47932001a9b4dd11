"""``EnvironmentPool``: many episodes at once, each within its limits; what goes wrong costs its episode alone."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

from grpo_pl.environment import Environment, PoolLimits, Transition, text_of
from grpo_pl.extras.agents.in_processes import Processes
from grpo_pl.extras.agents.in_threads import Threads
from grpo_pl.extras.agents.limits import at_fault

__all__ = ["EnvironmentPool", "PoolLimits"]


class EnvironmentPool:
    """Plays the episodes of one environment, named by numbers of the caller's choice.

    ``reset``, ``step`` and ``finish`` begin something and return at once; ``collect`` gives what has ended since. A
    wave of turns is a ``step`` for each episode and one ``collect_all``; an engine that draws on while others wait
    calls ``collect`` with a time-out of 0. Used by one thread.

    An episode whose transition is ``done`` has been closed, and its number is free again. Nothing that an environment
    does raises here: see ``Transition.status``.
    """

    def __init__(self, environment: Environment, limits: PoolLimits | None = None) -> None:
        self.environment, self.limits = environment, limits or PoolLimits()
        kind = Processes if environment.isolation == "process" else Threads
        self._runner: Processes | Threads = kind(environment, self.limits)
        self._started = False
        self._waiting: dict[int, str] = {}
        self._open: set[int] = set()

    def start(self) -> None:
        """Prepares the environment where episodes will be played; done by the first reset as well.

        Raises:
            ValueError: the environment refuses its settings, or cannot be sent to another process; or its steps may
                take as long as ``step_timeout_s`` by limits of its own.
        """
        slowest, allowed = self.environment.slowest_step_s, self.limits.step_timeout_s
        if slowest >= allowed:
            raise ValueError(
                f"a step of {type(self.environment).__name__} may take {slowest:g} s, and step_timeout_s={allowed:g} "
                "would end its episode first: raise step_timeout_s, or lower the environment's own limit."
            )
        if not self._started:
            self._runner.start()
            self._started = True

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks that the environment brings along, listed where its episodes are played.

        Raises:
            ValueError: they cannot be listed, or what :meth:`start` refuses.
        """
        self.start()
        return self._runner.tasks()

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begins an episode; one of that number must not be open."""
        if episode in self._open:
            raise ValueError(f"episode {episode} is open: release it first.")
        self.start()
        self._open.add(episode)
        self._submit(episode, "reset", {"seed": seed, "row": dict(row)})

    def step(self, episode: int, action: str, *, drawn: Mapping[str, Any] | None = None) -> None:
        """Begins a turn of an open episode, of which nothing else is under way.

        Args:
            drawn: how the action was drawn, for an environment that ``writes_prompt``: ``finish_reason``, and the
                numbers ``prompt_tokens`` and ``completion_tokens``.
        """
        self._require_idle(episode)
        self._submit(episode, "step", {"action": action} if drawn is None else {"action": action, "drawn": drawn})

    def finish(self, episode: int) -> None:
        """Begins the end of an open episode by a limit of the caller's; its transition has the reward still due."""
        self._require_idle(episode)
        self._submit(episode, "finish", {})

    def collect(self, timeout_s: float | None = None) -> dict[int, Transition]:
        """Transitions that are complete, by the number of the episode; waits for the first.

        Args:
            timeout_s: wait no longer than this; None waits for as long as the limits allow. Empty where nothing is
                under way.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: dict[int, Transition] = {}
        while self._waiting and not found:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            found = {episode: self._ended(episode, end) for episode, end in self._runner.poll(max(0.0, left))}
            if left <= 0:
                break
        return found

    def collect_all(self) -> dict[int, Transition]:
        """Waits for all that is under way, which no limit lets take for ever."""
        found: dict[int, Transition] = {}
        while self._waiting:
            found |= self.collect()
        return found

    def release(self, episode: int) -> None:
        """Ends an episode before its time; nothing happens where it has ended."""
        if episode in self._waiting:
            raise ValueError(f"the last turn of episode {episode} has not been collected.")
        if episode in self._open:
            self._open.discard(episode)
            self._runner.discard(episode)

    def close(self) -> None:
        """Ends all episodes, processes and threads; the pool may be used again."""
        self._runner.close()
        self._open.clear()
        self._waiting.clear()
        self._started = False

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_idle(self, episode: int) -> None:
        if episode not in self._open or episode in self._waiting:
            raise ValueError(f"episode {episode} is not open, or its last turn has not been collected.")

    def _submit(self, episode: int, method: str, arguments: dict[str, Any]) -> None:
        self._waiting[episode] = method
        self._runner.submit(episode, method, arguments)

    def _ended(self, episode: int, transition: Transition) -> Transition:
        method, longest = self._waiting.pop(episode), self.limits.max_observation_chars
        length = max(len(text_of(transition.observation)), len(transition.state))
        if length > longest:
            detail = f"{method} answered {length} characters, {longest} are allowed"
            transition = at_fault(self.environment, method, "too_long", detail)
        said = transition.info.get("warnings")
        for text in said if isinstance(said, list) else ():
            warnings.warn(f"{type(self.environment).__name__}: {text}"[:300], stacklevel=3)
        if transition.done:
            self.release(episode)
        return transition
