"""``FunctionReward``: any Python function as a reward, with the signature that TRL calls."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_pl.rewards.base import Reward, Score


def load_function(reference: str) -> Callable[..., Any]:
    """The function that ``package.module.function``, ``package.module:function`` or ``file.py:function`` names.

    Raises:
        ValueError: no such module, file or function, or it is not callable; one line that names the reference.
    """
    place, colon, name = reference.rpartition(":")
    if not colon:
        place, _, name = reference.rpartition(".")
    if not place or not name:
        raise ValueError(f"function {reference!r} must look like 'package.module.function' or 'file.py:function'.")
    try:
        module = _module_from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # the user's module may raise anything at import
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"function {reference!r} cannot be loaded: {problem}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no such name" if function is None else f"holds a {type(function).__name__}, which cannot be called"
        raise ValueError(f"function {reference!r} cannot be loaded: {place} {what}.")
    return function  # type: ignore[no-any-return]


def _module_from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"grpo_pl_function_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where an event loop already runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@dataclass(kw_only=True)
class FunctionReward(Reward):
    """Calls ``function(completions=…, prompts=…, <columns by name>) -> list[float | None]``; its range is its own.

    This is TRL's signature, so functions written for TRL run unchanged, plain or ``async``. The function gets the gold
    answers as ``answer`` unless the data set has a column of that name, and of all columns those that its signature
    names, or all if it takes ``**kwargs``. ``None`` means that the reward says nothing about a completion: it becomes
    ``unavailable``. A value of 1 or more has status ``ok``, a lower one ``wrong``.

    An exception inside the function ends the run, with a note that names the function: a training run that goes on
    with a broken reward is worse than none.
    """

    name: str = "function"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right."""
    function: str
    """``package.module.function``, ``package.module:function`` or ``path/to/file.py:function``."""
    conversational: bool = False
    """Hand each completion over as ``[{"role": "assistant", "content": text}]``, as TRL does for chat data sets."""

    def __post_init__(self) -> None:
        self._call = load_function(self.function)
        parameters = inspect.signature(self._call).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not self._takes_all and "completions" not in self._names:
            raise ValueError(
                f"function {self.function!r} must take 'completions' by name; it takes {sorted(self._names)}."
            )

    @property
    def needs(self) -> frozenset[str]:
        """What its signature names of them; both if it takes ``**kwargs``, because it may read them."""
        columns = {"completion_length", "completion_ids"}
        return frozenset(columns if self._takes_all else columns & self._names)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        arguments: dict[str, Any] = {"answer": list(answers), **{k: list(v) for k, v in columns.items()}}
        if "prompt" in columns:
            arguments["prompts"] = arguments.pop("prompt")
        arguments["completions"] = (
            [[{"role": "assistant", "content": text}] for text in completions]
            if self.conversational
            else list(completions)
        )
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        try:
            values = self._call(**arguments)
            if inspect.iscoroutine(values):
                values = _run(values)
        except Exception as error:
            error.add_note(f"raised by the reward function {self.function!r}")
            raise
        return self._scores(list(values), len(completions))

    def _scores(self, values: list[Any], count: int) -> list[Score]:
        if len(values) != count:
            raise ValueError(f"function {self.function!r} returned {len(values)} values for {count} completions.")
        scores = []
        for value in values:
            if value is None:
                scores.append(Score(None, "unavailable", "the function returned None"))
                continue
            number = float(value)
            if not math.isfinite(number):
                raise ValueError(f"function {self.function!r} returned {number}: rewards must be finite or None.")
            scores.append(Score(number, "ok" if number >= 1.0 else "wrong"))
        return scores

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()
