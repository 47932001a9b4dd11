"""Narrower ranges of a reasoning-gym task, for a policy that begins from nothing."""

from __future__ import annotations

import math
from typing import Any

COUNT = 64
"""Ranges narrower than this are counts, of terms, words, digits; wider ones are sizes of numbers."""
SHARE = 4
"""A range of counts is cut to its lowest part in this many, or as far as leaves enough problems."""
LARGE = 1000
"""The digits of a number are halved until it is no larger, if that leaves enough problems."""
SMALL = 10
"""Numbers up to this one are not halved further."""
DRAWN = 400
"""Problems that are drawn to see whether a narrower range leaves enough of them."""
DIFFERENT = 0.8
"""Share of these that must differ: about 860 problems in all, if they are equally likely."""


def easier_settings(task: str) -> dict[str, Any]:
    """Settings that differ from the task's defaults: the upper ends of its ranges ``min_x`` … ``max_x``, lowered.

    Counts keep the lowest quarter of their range, or as much more as leaves enough different problems, and numbers no
    decimals; numbers keep half of their digits, and half again where they are still larger than 1,000, then half of
    what is left, as far as leaves enough problems: a small policy learns the facts about 50 numbers sooner than those
    about 100. What the task refuses stays as it is.
    """
    import reasoning_gym  # type: ignore[import-untyped]

    defaults = vars(reasoning_gym.create_dataset(task, size=1, seed=0).config)
    found: dict[str, Any] = {}
    for name, high in defaults.items():
        rest = name.removeprefix("max_")
        low = defaults.get(f"min_{rest}")
        numeric = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
        if rest == name or not numeric or not low < high:
            continue
        none = [(low, low)] if rest == "decimals" else []
        for narrow in [*none, *narrowed(low, high)]:
            named = zip((f"min_{rest}", f"max_{rest}"), narrow, strict=True)
            changed = {key: value for key, value in named if value != defaults[key]}
            if _has_enough(task, {**found, **changed}):
                found |= changed
                break
    return found


def narrowed(low: Any, high: Any) -> list[tuple[Any, Any]]:
    """Narrower ranges of the same types, the narrowest first: of 2 … 6 those to 3, 4 and 5; of 1 … 1000 those to 50 and
    100; of 1 … 10⁹ those to 500, 1000, 50,000 and 10⁵; of -100.0 … 100.0 that from -10.0 to 10.0."""
    if high - low >= COUNT:
        halved: list[tuple[Any, Any]] = []
        while not halved or high > LARGE:
            low, high, before = _half_the_digits(low) if low < 0 else low, _half_the_digits(high), (low, high)
            if (low, high) == before:
                break
            halved.append((low, high))
        each = [(end[0], type(high)(end[1] // part)) for end in halved[::-1] for part in ((2, 1) if low >= 0 else (1,))]
        return [end for end in each if end[1] > SMALL or end in halved]
    if low < 0 < high:
        return [(type(low)(-(-low // SHARE)), type(high)(high // SHARE))]
    return [(low, type(high)(end)) for end in range(int(low + (high - low) // SHARE), math.ceil(high))]


def _half_the_digits(number: Any) -> Any:
    """The nearest power of ten above the square root, with the sign of the number."""
    if abs(number) <= 10:
        return number
    return type(number)(math.copysign(10 ** math.ceil(math.log10(abs(number)) / 2), number))


def _has_enough(task: str, settings: dict[str, Any]) -> bool:
    import reasoning_gym

    try:
        problems = reasoning_gym.create_dataset(task, size=DRAWN, seed=0, **settings)
        questions = {entry["question"] for entry in problems}
    except Exception:  # whatever a task raises, its ranges stay as they are
        return False
    return len(questions) >= DIFFERENT * DRAWN
