"""``FunctionReward``: any Python function as a reward, with the signature that TRL calls."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from grpo_pl.processes.modules import load_module
from grpo_pl.rewards.background import run_coroutine
from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score
from grpo_pl.rewards.logged_extras import current_extras


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
        module = load_module(place)
    except Exception as error:  # the user's module may raise anything at import
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"function {reference!r} cannot be loaded: {problem}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no such name" if function is None else f"holds a {type(function).__name__}, which cannot be called"
        raise ValueError(f"function {reference!r} cannot be loaded: {place} {what}.")
    return function  # type: ignore[no-any-return]


def reference_of(function: str | Callable[..., Any]) -> str:
    """The text by which `load_function` finds ``function``.

    Raises:
        ValueError: no other process could import it by name: a lambda, or a function defined in a notebook.
    """
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    raise ValueError(
        f"function {_shown(function)} cannot be found by name in another process, so nothing can be rebuilt with it: "
        "put it at the top of a module or a file and give 'package.module:function' or 'file.py:function'."
    )


def _shown(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return repr(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return repr(f"{getattr(function, '__module__', '')}.{name}")


@dataclass(kw_only=True)
class FunctionReward(Reward):
    """Calls ``function(prompts=…, completions=…, <columns by name>) -> list[float | None]``; any finite range.

    This is TRL's signature, so functions written for TRL run unchanged, plain or ``async``; asynchronous ones run
    at the same time as the other rewards. A function gets those arguments that its signature names, or all if it takes
    ``**kwargs``: the columns of the data set, and

    - ``answer``: the gold answers, unless the data set has a column of that name;
    - ``completion_ids``: the token ids of each completion, the end token included (see `needs`);
    - ``trainer_state``: a ``transformers.TrainerState`` whose ``global_step`` and ``max_steps`` count rollouts; None
      outside training;
    - ``log_extra(column, values)``: adds a column to the table of completions, and to the rows of ``score`` and
      ``predict``; one value per completion. Of two functions that log one name, each gets ``reward/column``;
    - ``log_metric(name, value)``: adds to a metric, which is averaged over the calls of a rollout and over processes;
      has no effect outside training and validation.

    Prompts and completions are texts, or lists of messages if the prompts of the data set are conversations. ``None``
    means that the function gives a completion no value: its status becomes ``unavailable``. A value of 1 or more has
    status ``ok``, a lower one ``wrong``.

    If the function raises, the run saves its last rollout and ends, with a note that names the function, because going
    on with a broken reward would spoil the training. ``on_error: none`` is for functions that fail occasionally, such
    as those that call a service.
    """

    name: str = "function"
    function: str | Callable[..., Any]
    """``package.module.function``, ``package.module:function`` or ``path/to/file.py:function``; in Python also the
    function itself."""
    on_error: Literal["raise", "none"] = "raise"
    """Reaction to a function that raises or returns no valid values: ``raise`` ends the run; ``none`` warns and
    gives all completions of the call None with status ``unavailable``, which is counted."""
    conversational: bool | None = None
    """Pass prompts and completions as lists of messages, as TRL does for chat data sets; null does so if the prompts of
    the data set are conversations."""

    def __post_init__(self) -> None:
        self._call = load_function(self.function) if isinstance(self.function, str) else self.function
        if not callable(self._call):
            raise ValueError(f"function must be a reference or a function, got {self.function!r}.")
        parameters = inspect.signature(self._call).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in named}
        self._required = {p.name for p in named if p.default is p.empty}
        if not self._takes_all and "completions" not in self._names:
            raise ValueError(
                f"function {_shown(self.function)} must take 'completions' by name; it takes {sorted(self._names)}."
            )

    @property
    def needs(self) -> frozenset[str]:
        """``completion_length`` and ``completion_ids``, as far as the signature names them; both if it takes
        ``**kwargs``, because it may read them."""
        columns = {"completion_length", "completion_ids"}
        return frozenset(columns if self._takes_all else columns & self._names)

    @property
    def asynchronous(self) -> bool:
        function = self._call
        while isinstance(function, partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

    def init_args(self) -> dict[str, Any]:
        return {**super().init_args(), "function": reference_of(self.function)}

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        arguments = self._arguments(completions, answers, columns)
        try:
            values = self._call(**arguments)
            if inspect.iscoroutine(values):
                values = run_coroutine(values)
            return self._scores(values, len(completions))
        except (Exception, SystemExit) as error:
            error.add_note(f"raised by the reward function {_shown(self.function)}")
            raise

    def _arguments(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> dict[str, Any]:
        arguments: dict[str, Any] = {"answer": list(answers), **{k: list(v) for k, v in columns.items()}}
        arguments["completions"] = list(completions)
        if "prompt" in columns:
            arguments["prompts"] = arguments.pop("prompt")
        messages = "prompt_messages" in columns
        if messages if self.conversational is None else self.conversational:
            arguments["completions"] = [[{"role": "assistant", "content": text}] for text in completions]
            if messages:
                arguments["prompts"] = arguments["prompt_messages"]
            elif "prompt" in columns:
                asked = columns.get("question", columns["prompt"])
                arguments["prompts"] = [[{"role": "user", "content": text}] for text in asked]
        extras = current_extras()
        if self._takes_all or "trainer_state" in self._names:
            arguments["trainer_state"] = extras.trainer_state and extras.trainer_state()
        arguments |= {"log_extra": partial(extras.log_extra, self.name), "log_metric": extras.log_metric}
        missing = sorted(self._required - arguments.keys())
        if missing:
            raise MissingColumn(
                f"function {_shown(self.function)} takes {missing[0]!r}, and there is no such column; "
                f"there are {sorted(columns)}."
            )
        return {name: value for name, value in arguments.items() if self._takes_all or name in self._names}

    def _scores(self, returned: Any, count: int) -> list[Score]:
        if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
            what = "None" if returned is None else f"a {type(returned).__name__}"
            raise TypeError(f"function {_shown(self.function)} returned {what}: return a list of numbers or None.")
        values = list(returned)
        if len(values) != count:
            raise ValueError(f"function {_shown(self.function)} returned {len(values)} values for {count} completions.")
        scores = []
        for value in values:
            if value is None:
                scores.append(Score(None, "unavailable", "the function returned None"))
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"function {_shown(self.function)} returned {value!r:.80}: rewards must be finite numbers or None."
                ) from None
            if not math.isfinite(number):
                raise ValueError(f"function {_shown(self.function)} returned {number}: rewards must be finite or None.")
            scores.append(Score.of(number))
        return scores

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()
