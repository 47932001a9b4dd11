"""Narrower ranges of a reasoning-gym task, for a policy that begins from nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_pl.data.tasks.worked import worked
from grpo_pl.extras.scaffold.small_policy import constant_parts, token_counter

COUNT = 64
"""Ranges narrower than this are counts, of terms, words, digits; wider ones are sizes of numbers."""
SHARE = 4
"""A range of counts is cut to its lowest part in this many, or as far as leaves enough problems."""
SMALL = 5
"""Sizes of numbers are not made smaller than this."""
DRAWN = 400
"""Problems that are drawn to see whether a narrower range leaves enough of them."""
DIFFERENT = 0.8
"""Share of these that must differ: about 860 problems in all, if they are equally likely."""
RECURRING = 0.85
"""A range is widened again while this share of the steps of new problems occurred in 300 others; a cold start shows
some 40 times as many. Which step to take is learned beside that."""
LONGEST = 64
"""… and while the longer half of the rows have no more tokens than this in the mean."""
NOT_OF_PROBLEMS = ("size", "seed")


def easier_settings(task: str) -> dict[str, Any]:
    """Settings that differ from the task's defaults: the numbers among its parameters, lowered.

    First every range ``min_x`` … ``max_x`` and every other number is made as small as leaves enough problems that
    differ: counts the lowest quarter of their range, sizes of numbers 5, 10, 20, 50 …, decimals none; a number that is
    no ``max_x`` only if the texts get shorter by it. Then ranges are widened again, one after the other, while rows
    stay short and the steps of the worked solutions recur, so that the policy meets each often enough to learn it. What
    the task refuses stays as it is.
    """
    import reasoning_gym  # type: ignore[import-untyped]

    defaults = vars(reasoning_gym.create_dataset(task, size=1, seed=0).config)
    found: dict[str, Any] = {}
    ladders: list[list[dict[str, Any]]] = []
    for name, ladder in _ladders(defaults):
        most = math.inf if name.startswith("max_") else 0.95 * _characters(_entries(task, found))
        for rung, narrow in enumerate(ladder):
            entries = _entries(task, {**found, **narrow})
            # problems with the same steps count as one, such as one problem in two wordings
            different = {worked(task, entry["metadata"]) or entry["question"] for entry in entries}
            if _characters(entries) < most and len(different) >= DIFFERENT * DRAWN:
                found |= narrow
                ladders.append(ladder[rung + 1 :])
                break
    for ladder in ladders:
        for wider in ladder:
            if not is_learnable(task, {**found, **wider}):
                break
            found |= wider
    return {name: value for name, value in found.items() if value != defaults[name]}


def _entries(task: str, settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Problems of a task with these settings; none where the task refuses them."""
    import reasoning_gym

    try:
        return list(reasoning_gym.create_dataset(task, size=DRAWN, seed=0, **settings))
    except Exception:  # whatever a task raises, its ranges stay as they are
        return []


def _characters(entries: Sequence[Mapping[str, Any]]) -> int:
    """Of all questions and answers."""
    return sum(len(entry["question"]) + len(str(entry["answer"])) for entry in entries)


def _ladders(defaults: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Name of each number that can be lowered -> settings of it and of its lower end, the smallest first."""
    for name, high in defaults.items():
        if name in NOT_OF_PROBLEMS or name.startswith("min_") or not _is_number(high):
            continue
        rest = name.removeprefix("max_")
        low = defaults.get(f"min_{rest}", type(high)(1))
        if not (_is_number(low) and low < high) or (rest == name and not isinstance(high, int)):
            continue  # no range; a probability or a weight
        none = [(low, low)] if rest == "decimals" else []
        ends = [*none, *narrowed(low, high), (low, high)]
        yield name, [{f"min_{rest}": a, name: b} if f"min_{rest}" in defaults else {name: b} for a, b in ends]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def narrowed(low: Any, high: Any) -> list[tuple[Any, Any]]:
    """Narrower ranges of the same types, the narrowest first: of 2 … 6 those to 3, 4 and 5; of 1 … 1000 those to 5,
    10, 20, 50, 100, 200 and 500; of -20.0 … 20.0 those from -5.0 to 5.0 and -10.0 to 10.0."""
    if high - low >= COUNT:
        sizes = (lead * 10**power for power in range(1 + math.ceil(math.log10(high))) for lead in (1, 2, 5))
        return [(max(low, type(low)(-size)), type(high)(size)) for size in sizes if SMALL <= size < high and low < size]
    if low < 0 < high:
        return [(type(low)(-(-low // SHARE)), type(high)(high // SHARE))]
    return [(low, type(high)(end)) for end in range(int(low + (high - low) // SHARE), math.ceil(high))]


def is_learnable(task: str, settings: Mapping[str, Any]) -> bool:
    """True if the steps of the worked solutions recur and the rows are short; false where no steps are known."""
    entries = _entries(task, settings)
    works = [worked(task, entry["metadata"]) for entry in entries]
    known = {line for work in works[: DRAWN * 3 // 4] for line in work.splitlines()}
    new = [line for work in works[DRAWN * 3 // 4 :] for line in work.splitlines()]
    if not new or sum(line in known for line in new) < RECURRING * len(new):
        return False
    questions = [entry["question"] for entry in entries]
    length = token_counter(constant_parts(questions))
    answers = sorted(length(f"{work}{entry['answer']}") + 5 for work, entry in zip(works, entries, strict=True))
    longer = answers[len(answers) // 2 :]  # as those with their work are of the demonstrations
    return sum(map(length, questions)) / DRAWN + sum(longer) / len(longer) <= LONGEST
