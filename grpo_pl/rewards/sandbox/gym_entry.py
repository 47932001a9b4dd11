"""Packs a problem of reasoning-gym as JSON text for the worker that scores answers, and checks such text on reading.

The worker imports this file: it needs the standard library alone.
"""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

MAX_CHARS = 1_000_000
"""Longer text is refused; the largest problems of reasoning-gym have some ten thousand characters."""
REFUSED = {"composite": "it mixes tasks; give each its own source in grpo_pl.data.mixture.MixturePrompts"}
"""Tasks that are refused -> the reason."""
OWN_SETTINGS = frozenset({"seed", "size"})
"""Settings that ``ReasoningGymPrompts`` sets itself, so that a problem may not."""


class GymProblem(NamedTuple):
    """One problem: ``entry`` is an item of reasoning-gym's ``create_dataset(task, **settings)``."""

    task: str
    settings: dict[str, Any]
    entry: dict[str, Any]


def pack(problem: GymProblem) -> str:
    """The problem as JSON text.

    Raises:
        ValueError: it holds something other than numbers, fractions, text, dates, times, and lists, tuples, sets and
            dictionaries of these; or the text is longer than ``MAX_CHARS``.
    """
    tree = {"task": problem.task, "settings": problem.settings, "entry": problem.entry}
    try:
        text = json.dumps(_plain(tree), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a problem of {problem.task!r} cannot be written as JSON: {error}") from error
    if len(text) > MAX_CHARS:
        raise ValueError(f"a problem of {problem.task!r} has {len(text)} characters, {MAX_CHARS} are allowed.")
    return text


def unpack(text: Any) -> GymProblem:
    """The problem in a text that `pack` wrote.

    Raises:
        ValueError: ``text`` is not of that form, or names a task or a setting that `check_task` refuses.
        ImportError: reasoning-gym is not installed.
    """
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        raise ValueError(f"must be JSON text of at most {MAX_CHARS} characters")
    try:
        tree = json.loads(text, object_hook=_restored, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"must be the JSON text that ReasoningGymPrompts writes, got {text[:40]!r}") from error
    if not isinstance(tree, dict) or tree.keys() != {"task", "settings", "entry"}:
        raise ValueError("must be a JSON object of task, settings and entry")
    task, settings, entry = tree["task"], tree["settings"], tree["entry"]
    if not (
        isinstance(task, str)
        and isinstance(settings, dict)
        and isinstance(entry, dict)
        and isinstance(entry.get("question", ""), str)
        and isinstance(entry.get("answer"), str | None)
        and isinstance(entry.get("metadata"), dict)
    ):
        raise ValueError("must hold the name of a task, settings, and an entry with an answer or null, and metadata")
    check_task(task, settings)
    return GymProblem(task, settings, entry)


def check_task(task: str, settings: Mapping[str, Any]) -> None:
    """Refuses tasks and settings that reasoning-gym does not have, and the tasks in ``REFUSED``.

    Raises:
        ValueError: an unknown or refused task, or an unknown setting; suggests what there is.
        ImportError: reasoning-gym is not installed.
    """
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("reasoning-gym is not installed: pip install 'grpo_pl[reasoning-gym]'.") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"reasoning-gym has no task {task[:60]!r}{hint}")
    if task in REFUSED:
        raise ValueError(f"the task {task!r} of reasoning-gym is refused: {REFUSED[task]}.")
    names = set(DATASETS[task][1].__dataclass_fields__) - OWN_SETTINGS
    unknown = sorted(map(str, set(settings) - names))
    if unknown:
        raise ValueError(
            f"reasoning-gym refuses the settings {dict(settings)} of {task!r}: there is no {unknown[0][:60]!r} "
            f"(settings: {', '.join(sorted(names))})"
        )


def _plain(value: Any) -> Any:
    """``value`` in JSON types; other types become an object with one key that begins with ``$`` (see ``_KINDS``)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _plain(item) for key, item in value.items()}
    for tag, (kind, parts, _) in _KINDS.items():
        if isinstance(value, kind):
            return {tag: _plain(parts(value))}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} is not plain data")


def _restored(tree: dict[str, Any]) -> Any:
    tag = next(iter(tree), "")
    return _KINDS[tag][2](tree[tag]) if len(tree) == 1 and tag in _KINDS else tree


def _fraction(pair: Any) -> Fraction:
    numerator, denominator = pair
    if type(numerator) is not int or type(denominator) is not int or denominator == 0:
        raise ValueError("a fraction is two whole numbers, the second not 0")
    return Fraction(numerator, denominator)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_KINDS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$tuple": (tuple, list, tuple),
    "$set": (set | frozenset, lambda value: sorted(value, key=repr), set),
    "$items": (dict, lambda value: [[key, item] for key, item in value.items()], dict),
    "$fraction": (Fraction, lambda value: [value.numerator, value.denominator], _fraction),
    "$datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "$date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "$time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
"""Key -> class, how its values are written in plain types, and how they are made of these again; a datetime is a date
too, and comes before it."""
