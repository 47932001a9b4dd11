"""Checks all gold answers before training: completions of a prompt with an unusable gold answer teach nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from grpo_pl.files.rows import read_object
from grpo_pl.files.writing import staged
from grpo_pl.rewards.base import Reward, held_by


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
    file = cache_folder / f"faults-{_fingerprint(reward, golds)}.json" if cache_folder is not None else None
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


def _fingerprint(reward: Reward, golds: Sequence[str]) -> str:
    content = [reward.spec(), version("grpo_pl"), version("math-verify"), list(golds)]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:24]
