"""``ToolEnvironment``: plain functions as tools; an action that calls none is the answer, and ends the episode."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_pl.environment import Observation, Step, Unavailable, resolved
from grpo_pl.extras.agents.tool_calls import Call, CallsTools, Result
from grpo_pl.functional.argument_checks import check_at_least, check_positive
from grpo_pl.rewards.function import reference_of
from grpo_pl.rewards.sandbox.pool import SandboxSettings, WorkerPool, shared_pool


@dataclass(kw_only=True)
class ToolEnvironment(CallsTools):
    """Functions with type hints and a docstring, as TRL's ``tools`` take them, called in the sandbox of the rewards.

    Whatever a call does, the policy is told: a result, or an error where the call is malformed, names no tool, raises,
    or takes more time or memory than it may. The environment gives no reward of its own: the answer is judged by the
    rewards of the run.
    """

    tools: Sequence[str | Callable[..., Any]]
    """Functions, or ``package.module:function`` or ``path/to/file.py:function``."""
    isolation: Literal["thread", "process"] = "thread"
    """Calls run in processes of the sandbox; the episodes themselves are trusted."""
    time_limit_s: float = 5.0
    """CPU seconds of one call; one that waits ends after three times as long."""
    action_limit_s: float = 20.0
    """Seconds of the clock that the calls of one action, made one after the other, may take together; those that are
    left are answered by an error. ``episodes.step_timeout_s`` must be longer."""
    most_calls: int = 10
    """Calls of one action that are made; the others are answered by an error."""
    memory_limit_mb: int = 1024
    """Address space of the processes that calls run in."""
    workers: int = 8
    """Calls that run at the same time: as many as steps do, ``episodes.threads``, so that none waits for others."""
    longest_result: int = 2000
    """Characters of a result that the policy reads; the rest is cut off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tools:
            raise ValueError("tools must name one function or more, got none.")
        check_positive(time_limit_s=self.time_limit_s, action_limit_s=self.action_limit_s)
        check_at_least(1, "ToolEnvironment", most_calls=self.most_calls)
        functions = [resolved(tool) for tool in self.tools]
        self._functions = {function.__name__: function for function in functions}
        if len(self._functions) < len(functions):
            raise ValueError(f"tools must have different names, got {[f.__name__ for f in functions]}.")
        self._references = {f.__name__: _reference(tool) for f, tool in zip(functions, self.tools, strict=True)}
        self.parser.check(self._functions)
        self._pool: WorkerPool | None = None

    @functools.cached_property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        return [schema(function) for function in self._functions.values()]

    def prepare(self) -> None:
        self._workers().start()

    def shutdown(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        return "", {}

    def step(self, action: str) -> Step:
        self._until = time.monotonic() + self.action_limit_s
        return self.answered(action, self._functions, self._result, most=self.most_calls)

    @property
    def slowest_step_s(self) -> float:
        return self.action_limit_s

    def _result(self, call: Call) -> Result:
        left = self._until - time.monotonic()
        if left <= 0:
            fault = f"not called: the calls before took the {self.action_limit_s:g} s of an action"
            return Result(call.name, fault, failed=True)
        job = {"arguments": dict(call.arguments), "path": sys.path, "longest": self.longest_result}
        reference = self._references[call.name]
        (verdict,) = self._workers().run([(reference, json.dumps(job))], within_s=left)
        if verdict.status == "unavailable":
            raise Unavailable(verdict.detail)
        if verdict.status == "ok":
            return Result(call.name, verdict.detail)
        return Result(call.name, verdict.detail or verdict.status, failed=True)

    def _workers(self) -> WorkerPool:
        if self._pool is None:
            self._pool = shared_pool(
                SandboxSettings(
                    workers=self.workers,
                    soft_limit_s=self.time_limit_s,
                    hard_limit_s=1.5 * self.time_limit_s,
                    wall_factor=2.0,
                    memory_limit_mb=self.memory_limit_mb,
                    cache_size=0,  # a tool may answer the same call differently
                    judge="grpo_pl.rewards.sandbox.tool_call",
                )
            )
        return self._pool


def schema(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The JSON schema of a tool, from its type hints and docstring.

    Raises:
        ValueError: it lacks a type hint, or the description of itself or an argument.
    """
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)  # type: ignore[no-any-return]
    except Exception as error:  # of classes of transformers' own
        raise ValueError(f"tool {function.__name__!r} has no schema: {' '.join(str(error).split())}") from error


def _reference(tool: str | Callable[..., Any]) -> str:
    """``place:name``, a file with its whole path: what a worker finds a tool by."""
    if callable(tool):
        try:
            return reference_of(tool)
        except ValueError as error:
            raise ValueError(
                f"tool {tool!r} cannot be found by name in another process: put it at the top of a module or a file."
            ) from error
    place, colon, name = tool.rpartition(":")
    if not colon:
        place, _, name = tool.rpartition(".")
    return f"{Path(place).resolve() if place.endswith('.py') else place}:{name}"
