"""``GymnasiumEnvironment``: any environment that ``gymnasium.make`` knows, seen and steered through text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_pl.environment import Environment, EnvironmentMistake, Observation, Step, resolved, text_of

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_INTEGER = re.compile(r"-?\d+")


@dataclass(kw_only=True)
class GymnasiumEnvironment(Environment):
    """``gymnasium.make(id, **kwargs)``; an action that means nothing leaves the environment as it is."""

    id: str
    """Id for ``gymnasium.make``, such as ``FrozenLake-v1``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``gymnasium.make``."""
    from_row: Sequence[str] = ()
    """Columns of the prompt that are arguments of ``gymnasium.make`` too, so that each prompt has its own world."""
    observe: str | Callable[[Any, Any], Observation] | None = None
    """``observe(env, observation)`` gives the text; null takes ``env.render()`` for ``render_mode: ansi``, without its
    colours, else the observation as Python prints it."""
    parse: str | Callable[[str, Any], Any] | None = None
    """``parse(action, env.action_space)`` gives the action, None where the text means none; null reads the first whole
    number in the text, or takes the text itself where the space is one of texts."""
    invalid: str = "Invalid action."
    """Reply to an action that means nothing; the last observation follows. Empty gives that alone."""

    def __post_init__(self) -> None:
        self._observe, self._parse = resolved(self.observe or shown), resolved(self.parse or number_or_text)
        self._env: Any = None

    def prepare(self) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise ValueError("gymnasium is not installed: pip install 'grpo_pl[environments]'.") from error
        try:
            gymnasium.spec(self.id)
            if not self.from_row:
                gymnasium.make(self.id, **self.kwargs).close()
        except Exception as error:  # gymnasium's own errors, or whatever the environment raises
            detail = " ".join(str(error).split())
            raise ValueError(f"gymnasium cannot make {self.id!r} with {self.kwargs}: {detail}") from error

    @property
    def columns(self) -> Sequence[str]:
        return self.from_row

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        import gymnasium

        missing = [name for name in self.from_row if name not in row]
        if missing:
            raise EnvironmentMistake(f"from_row names the column {missing[0]!r}, and the prompt has {sorted(row)}.")
        arguments = self.kwargs | {name: row[name] for name in self.from_row}
        self._env = gymnasium.make(self.id, disable_env_checker=True, **arguments)
        observation, info = self._env.reset(seed=seed % 2**32)
        self._last = self._observe(self._env, observation)
        self._last_info = dict(info)
        return self._last, self._last_info

    def step(self, action: str) -> Step:
        chosen = self._parse(action, self._env.action_space)
        if chosen is None or not self._env.action_space.contains(chosen):
            state = self._last_info.get("state", text_of(self._last))
            reply: Observation = (
                "\n".join(filter(None, (self.invalid, self._last)))
                if isinstance(self._last, str)
                else [*([{"role": "user", "content": self.invalid}] if self.invalid else []), *self._last]
            )
            return reply, 0.0, False, False, {"invalid_action": True, "state": state}
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        self._last, self._last_info = self._observe(self._env, observation), dict(info)
        return self._last, reward, terminated, truncated, self._last_info

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def shown(env: Any, observation: Any) -> str:
    """The text of ``env.render()`` without colours, or the observation as Python prints it."""
    return _COLOUR.sub("", str(env.render() if env.render_mode == "ansi" else observation))


def number_or_text(action: str, space: Any) -> Any:
    """The first whole number of a text; the text itself where the space is one of texts."""
    if type(space).__name__ == "Text":
        return action
    found = _INTEGER.search(action)
    return int(found.group()) if found and len(found.group()) < 1000 else None  # int() refuses more than 4300 digits


def numbers_of(observation: Any) -> list[int | float] | None:
    """The numbers of an array, a tuple or a number, in order, truth values as 0 and 1; None of anything else."""
    if hasattr(observation, "ravel"):
        observation = tuple(observation.ravel().tolist())
    if isinstance(observation, tuple):
        parts = [numbers_of(part) for part in observation]
        return None if None in parts else [number for part in parts if part is not None for number in part]
    if not isinstance(observation, int | float):
        return None
    return [int(observation) if isinstance(observation, bool) else observation]
