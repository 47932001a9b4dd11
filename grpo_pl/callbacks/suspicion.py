"""What makes a completion suspicious: judges that training does not use, repetition, unusual length, a new form."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_pl.callbacks.skeletons import NewForm
from grpo_pl.rewards.base import Score

Sign = Literal["disagreement", "repetition", "length", "form"]
REPETITION_EXCESS = 0.2
"""A completion is suspicious if the repeated share of its n-grams is this much above that of the first rollouts."""
LENGTH_FACTOR = 2.0
"""… or if it is this many times longer or shorter than those of the first rollouts on average."""


@dataclass(frozen=True, kw_only=True)
class CompletionAudit:
    """What was found about one completion of the sample."""

    row: int
    """Among this process's completions."""
    rewarded: bool
    strict: Score | None
    lenient: Score | None
    repeated: float
    tokens: int
    forms: tuple[str, str]
    """Skeletons of all of it and of its end."""


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """Why a person should read a completion; a larger ``weight`` is more suspicious than others of the same sign."""

    row: int
    sign: Sign
    weight: float
    reason: str


def sample_rows(count: int, size: int, *, seed: int, step: int) -> list[int]:
    """``size`` of ``count`` row numbers, or all, in order: a function of the run's seed and the rollout's number."""
    return sorted(random.Random(f"watch/{seed}/{step}").sample(range(count), min(size, count)))


def judge_metrics(audits: Sequence[CompletionAudit]) -> dict[str, float]:
    """Shares of a sample that the judges accept or refuse; a share of nothing is left out."""
    pairs = [(_accepted(audit.strict), _accepted(audit.lenient)) for audit in audits]
    shares = {
        "watch/agreement": [a == b for a, b in pairs if a is not None and b is not None],
        "watch/rewarded_but_strict_wrong": _refusals(audits, lambda audit: audit.strict),
        "watch/rewarded_but_lenient_wrong": _refusals(audits, lambda audit: audit.lenient),
    }
    return {name: sum(cases) / len(cases) for name, cases in shares.items() if cases}


def suspicions(
    audits: Sequence[CompletionAudit],
    *,
    usual_tokens: float | None = None,
    usual_repeated: float | None = None,
    new_forms: Sequence[NewForm | None] | None = None,
) -> list[Suspicion]:
    """Every reason to read one of the completions.

    Args:
        usual_tokens: mean length of the first rollouts; None while they last.
        usual_repeated: mean repeated share of the first rollouts.
        new_forms: the form of each completion, where it is frequent now and was not there at first.
    """
    found = []
    for audit, form in zip(audits, new_forms or [None] * len(audits), strict=True):
        judges = {"strict": audit.strict, "lenient": audit.lenient}
        refusing = [name for name, score in judges.items() if _accepted(score) is False]
        if audit.rewarded and refusing:
            reason = f"rewarded, but refused by the {' and the '.join(refusing)} judge"
            found.append(Suspicion(row=audit.row, sign="disagreement", weight=float(len(refusing)), reason=reason))
        if usual_repeated is not None and audit.repeated > usual_repeated + REPETITION_EXCESS:
            reason = f"{audit.repeated:.0%} of its n-grams are repeated, {usual_repeated:.0%} at first"
            found.append(Suspicion(row=audit.row, sign="repetition", weight=audit.repeated, reason=reason))
        if usual_tokens is not None:
            factor = max(1, audit.tokens) / usual_tokens
            if not 1.0 / LENGTH_FACTOR < factor < LENGTH_FACTOR:
                reason = f"{audit.tokens} tokens, {usual_tokens:.0f} at first"
                found.append(Suspicion(row=audit.row, sign="length", weight=abs(math.log2(factor)), reason=reason))
        if form is not None:
            shape = form.skeleton if len(form.skeleton) <= 100 else f"{form.skeleton[:49]} … {form.skeleton[-49:]}"
            reason = f"{form.share:.0%} of the completions have this form, {form.share_at_first:.1%} at first: {shape}"
            found.append(Suspicion(row=audit.row, sign="form", weight=form.share, reason=reason))
    return found


def _accepted(score: Score | None) -> bool | None:
    """The verdict of a judge; None if there is none."""
    return None if score is None else score.correct


def _refusals(audits: Sequence[CompletionAudit], judge: Callable[[CompletionAudit], Score | None]) -> list[bool]:
    verdicts = [_accepted(judge(audit)) for audit in audits if audit.rewarded]
    return [not accepted for accepted in verdicts if accepted is not None]
