"""``TextArenaEnvironment``: a single-player game of TextArena, each episode in a process of its own.

TextArena seeds Python's one global generator and draws from it during the game, so that two games in one process would
disturb each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.environment import Environment, Observation, Step, resolved

SEEDS = 2**31


@dataclass(kw_only=True)
class TextArenaEnvironment(Environment):
    """``textarena.make(id, **kwargs)`` without wrappers: observations are what the game said since the last action."""

    id: str
    """Id for ``textarena.make``, such as ``GuessTheNumber-v0``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``textarena.make``."""
    observe: str | Callable[[Any, Sequence[str]], Observation] | None = None
    """``observe(game, messages)`` gives the text of what the game said; null puts one message below the other."""

    def __post_init__(self) -> None:
        if self.isolation != "process":
            raise ValueError("TextArena seeds the process's generator: isolation must be 'process'.")
        self._observe = resolved(self.observe or _joined)
        self._game: Any = None

    def prepare(self) -> None:
        try:
            import textarena
        except ImportError as error:
            raise ValueError("textarena is not installed: pip install 'grpo_pl[environments]'.") from error
        from textarena.envs.registration import ENV_REGISTRY

        if self.id not in ENV_REGISTRY:
            near = difflib.get_close_matches(self.id, ENV_REGISTRY, n=1)
            raise ValueError(f"textarena has no game {self.id!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
        try:
            game = textarena.make(self._raw_id(), **self.kwargs)
            game.reset(num_players=1, seed=0)
        except Exception as error:  # a game may need a download, other arguments, or more players
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"textarena cannot play {self.id!r} alone with {self.kwargs}: {detail}") from error

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        import textarena

        self._game = textarena.make(self._raw_id(), **self.kwargs)
        self._game.reset(num_players=1, seed=seed % SEEDS)
        return self._said(), {}

    def step(self, action: str) -> Step:
        errors = self._game.state.error_count
        done, _ = self._game.step(action)
        observation = self._said()
        reward, invalid = 0.0, self._game.state.error_count > errors
        if done:
            rewards, info = self._game.close()
            reward, invalid = rewards[0], invalid or bool(info[0].get("invalid_move"))
        return observation, reward, bool(done), False, {"invalid_action": invalid}

    def _raw_id(self) -> str:
        """The id without wrappers, which repeat the whole history in every observation."""
        from textarena.envs.registration import ENV_REGISTRY

        raw = f"{self.id}-raw"
        return raw if raw in ENV_REGISTRY else self.id

    def _said(self) -> Observation:
        from textarena import ObservationType

        _, heard = self._game.get_observation()
        return self._observe(self._game, [text for _, text, kind in heard if kind != ObservationType.PLAYER_ACTION])


def _joined(game: Any, messages: Sequence[str]) -> str:
    return "\n".join(messages)
