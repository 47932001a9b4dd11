"""Reads and compares tuples, sets, intervals and lists of written-out numbers, without SymPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from grpo_pl.rewards.mathematics.answer_text import Number, read_number

_LIST = re.compile(
    r"(?P<open>\\\{|[(\[])?(?P<inside>[^(){}\[\]]*(?:\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}[^(){}\[\]]*)*?)(?P<close>\\\}|[)\]])?"
)
_THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")


@dataclass(frozen=True)
class NumberList:
    """Two or more numbers with commas between them, in brackets or without."""

    brackets: str
    """``()``, ``[]``, ``(]`` or ``[)``; ``{}`` for a set, ``""`` for a list without brackets."""
    numbers: tuple[Number, ...]


@lru_cache(maxsize=8192)
def read_number_list(text: str, *, percent_is_hundredth: bool = True) -> NumberList | None:
    """The list that canonical ``text`` spells out, or ``None`` if it is anything else or could be one number."""
    match = _LIST.fullmatch(text)
    if match is None or bool(match["open"]) != bool(match["close"]):
        return None
    if _THOUSANDS.search(match["inside"]) and (not match["open"] or ", " in match["inside"]):
        return None  # 1,000 and (1,000, 2,000); but (132,156) is a pair
    numbers = []
    for part in re.split("[,;]", match["inside"].rstrip("\\")):
        number = read_number(part.strip(), percent_is_hundredth=percent_is_hundredth)
        if number is None:
            return None
        numbers.append(number)
    brackets = ((match["open"] or "") + (match["close"] or "")).replace("\\{\\}", "{}")
    if "\\" in brackets:
        return None
    return NumberList(brackets, tuple(numbers)) if len(numbers) > 1 else None


def same_list(
    gold: NumberList, answer: NumberList, same: Callable[[Number, Number], bool], *, ordered: bool = False
) -> bool | None:
    """Whether two lists agree by ``same``; ``None`` if their brackets say different things.

    Sets have neither order nor duplicates. A list without brackets, which may stand for a set, has duplicates but no
    order, unless ``ordered``.
    """
    kinds = {gold.brackets, answer.brackets}
    if len(kinds) > 1 and kinds != {"", "{}"}:
        return None
    ours, theirs = gold.numbers, answer.numbers
    if kinds == {"{}"}:
        ours, theirs = (tuple({n.value: n for n in side}.values()) for side in (ours, theirs))
    if "{}" in kinds or (kinds == {""} and not ordered):
        ours, theirs = (tuple(sorted(side, key=lambda n: n.value)) for side in (ours, theirs))
    return len(ours) == len(theirs) and all(same(g, a) for g, a in zip(ours, theirs, strict=True))
