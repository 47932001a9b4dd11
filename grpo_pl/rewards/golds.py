"""Checks all gold answers before training: completions of a prompt with an unusable gold answer teach nothing."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from grpo_pl.files.rows import read_object
from grpo_pl.files.writing import staged
from grpo_pl.rewards.base import Reward, held_by, with_inner

_JUDGES = ("math-verify", "sympy", "latex2sympy2_extended")
"""Packages that read mathematics for us."""


@dataclass(frozen=True)
class BadGold:
    """A gold answer that the reward cannot judge against."""

    row: int
    """Its index among the gold answers that were checked."""
    gold: str
    fault: str


def check_golds(reward: Reward, golds: Sequence[str], *, cache_folder: Path | None = None) -> list[BadGold]:
    """The gold answers that ``reward`` cannot judge against, in order.

    Args:
        reward: the correctness reward.
        golds: the gold answers of a data set.
        cache_folder: where the result is stored, so that the same check is not made twice; created if missing. None
            stores nothing.
    """
    name = None if cache_folder is None else _fingerprint(reward, golds)
    file = None if cache_folder is None or name is None else cache_folder / f"faults-{name}.json"
    if file is not None and file.is_file():
        return [BadGold(row, golds[row], fault) for row, fault in read_object(file)["faults"]]
    distinct = list(dict.fromkeys(golds))
    faults = dict(zip(distinct, reward.gold_faults(distinct), strict=True))
    bad = [BadGold(row, gold, faults[gold]) for row, gold in enumerate(golds) if faults[gold]]
    if file is not None:
        with suppress(OSError), staged(file, shared=True) as staging:  # without the cache, the next start checks again
            staging.write_text(json.dumps({"faults": [(b.row, b.fault) for b in bad]}), encoding="utf-8")
    return bad


def needs_golds(reward: Reward) -> bool:
    """True if ``reward``, or a reward among its arguments, refuses an empty gold answer."""
    return bool(reward.gold_faults([""])[0]) or any(map(needs_golds, held_by(reward)))


def describe_bad_golds(bad: Sequence[BadGold], total: int) -> str:
    """One line that says how many gold answers are bad, with the first five."""
    first = "; ".join(f"row {b.row}: {b.gold[:60]!r} ({b.fault})" for b in bad[:5])
    return f"{len(bad)} of {total} gold answers cannot be judged against: {first}"


def _fingerprint(reward: Reward, golds: Sequence[str]) -> str | None:
    """Names a check by all that decides its outcome, the sources of the judge included; None for a reward without a
    file, such as one of a notebook."""
    kinds = {kind for held in with_inner([reward]) for kind in type(held).__mro__ if kind is not object}
    modules = {getattr(sys.modules[kind.__module__], "__file__", None) for kind in kinds}
    if None in modules:
        return None
    files = {*Path(__file__).parent.rglob("*.py"), *(Path(str(module)) for module in modules)}
    sources = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    content = [reward.spec(), sources, [version(name) for name in _JUDGES], list(golds)]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:24]
