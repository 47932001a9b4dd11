"""``TRLEnvironment``: what TRL's ``environment_factory`` makes, unchanged: its public methods are tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_pl.environment import Observation, Step, resolved
from grpo_pl.extras.agents.tool_calls import Call, CallsTools, Result
from grpo_pl.extras.agents.tools import schema


@dataclass(kw_only=True)
class TRLEnvironment(CallsTools):
    """``factory()`` gives an object with ``reset(**row) -> str | None``; its other public, typed methods are tools.

    What ``reset`` returns follows the question. An action without a call ends the episode. ``get_reward() -> float``,
    where there is one, is asked once, when the episode has ended; without one the rewards of the run judge alone.
    All methods may be ``async``. A tool that raises is answered by its error.
    """

    factory: str | Callable[[], Any]
    """The factory, or ``package.module:factory`` or ``path/to/file.py:factory``; a class is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._make = resolved(self.factory)
        self._object: Any = None
        self._loop: asyncio.Runner | None = None

    def prepare(self) -> None:
        """Makes an object once and looks at it.

        Raises:
            ValueError: it has no ``reset`` or no tool, or a tool cannot be called as the parser has it.
        """
        made = self._make()
        if not callable(getattr(made, "reset", None)):
            raise ValueError(f"factory {self.factory!r} makes a {type(made).__name__}, which has no method reset.")
        tools = _tools(made)
        if not tools:
            raise ValueError(
                f"{type(made).__name__} has no public method besides reset and get_reward: no tool to use."
            )
        self.parser.check(tools)

    @functools.cached_property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        return [schema(method) for method in _tools(self._make()).values()]

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        self._object = self._make()
        self._tools = _tools(self._object)
        columns = {"prompt": [{"role": "user", "content": row.get("question", "")}], "seed": seed, **row}
        parameters = inspect.signature(self._object.reset).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        observation = self._await(self._object.reset(**columns))
        return "" if observation is None else observation, {}

    def step(self, action: str) -> Step:
        return self.answered(action, self._tools, self._result)

    def finish(self) -> float:
        reward = getattr(self._object, "get_reward", None)
        return 0.0 if reward is None else self._await(reward())

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _result(self, call: Call) -> Result:
        try:
            return Result(call.name, str(self._await(self._tools[call.name](**call.arguments))))
        except Exception as error:  # TRL tells the policy as well
            return Result(call.name, str(error) or type(error).__name__, failed=True)

    def _await(self, value: Any) -> Any:
        """The value, or what the coroutine returns; one loop an episode, which connections may be bound to."""
        if not inspect.iscoroutine(value):
            return value
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(value)


def _tools(made: Any) -> dict[str, Callable[..., Any]]:
    """As TRL finds them: functions of the class, whatever its properties are."""
    names = [name for name, _ in inspect.getmembers(type(made), predicate=inspect.isfunction)]
    return {n: getattr(made, n) for n in names if n not in ("reset", "get_reward") and not n.startswith("_")}
