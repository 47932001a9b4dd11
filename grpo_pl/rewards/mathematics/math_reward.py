"""``MathReward`` and ``ExactReward``: compare the answer with the gold answer, by meaning or as text."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from grpo_pl.rewards.answer_reading import AnswerReward, Found
from grpo_pl.rewards.base import Columns, MissingColumn, Score, TextAnswerReward
from grpo_pl.rewards.completion_text import after_closed_thinking, after_thinking, is_blank
from grpo_pl.rewards.mathematics.answer_rules import AnswerRules, Job
from grpo_pl.rewards.mathematics.boxes import boxed_answer
from grpo_pl.rewards.mathematics.canonical import canonical
from grpo_pl.rewards.sandbox.pool import SandboxedReward, Verdict
from grpo_pl.rewards.sandbox.task_queue import looks_costly

_COSTLY = frozenset({"timeout", "killed", "crashed"})
_REMEMBERED, _REMEMBERED_S = 4096, 600.0  # gold answers that cost too much, and for how long: a machine may have hung


def _shown(answer: str) -> str:
    """``answer`` for logs: at most 80 characters, with U+FFFD in place of those that are not printable."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in answer[:80])
    return clean + "…" if len(answer) > 80 else clean


def _score(verdict: Verdict, found: Found, beside: str) -> Score:
    """The score of a verdict: 1 for ``ok``, None where the completion is not to blame, else 0."""
    status, answer = verdict.status, found.text
    if found.late and status == "no_answer":
        status = "timeout"
    value = 1.0 if status == "ok" else None if status == "unavailable" else 0.0
    if status == "bad_gold":
        return Score(None, status, verdict.detail)  # the fault is in the gold answer: do not show the answer
    notes = [verdict.detail] if verdict.detail else []
    if found.note:
        notes.append(found.note)
    if beside:
        notes.append(f"beside the box: {_shown(beside)}")
    return Score(value, status, ": ".join(filter(None, [_shown(answer), "; ".join(notes)])))


def text_beside_box(completion: str) -> str:
    r"""The text of the last ``<answer>`` block around its answer; ``""`` if there is no such text, block or box."""
    _, opened, block = completion.rpartition("<answer>")
    boxed = boxed_answer(block.partition("</answer>")[0]) if opened else None
    return boxed.beside if boxed is not None else ""


def _pair(gold: str, found: Found, completion: str) -> tuple[str, str]:
    """The gold answer and the answer as they are compared. A box in the gold answer is read like one in a completion;
    a percent sign behind a box belongs to it where the other side has one."""
    of_gold, answer = boxed_answer(gold, adjacent=True) if r"\boxed" in gold else None, found.text
    if of_gold is None and "%" not in gold and "per" not in gold and "pct" not in gold:
        return gold, answer
    boxed = boxed_answer(completion)
    behind = boxed is not None and boxed.percent
    if of_gold is not None:
        gold = of_gold.answer + (r"\%" if of_gold.percent and (behind or _has_percent(answer)) else "")
    return gold, answer + (r"\%" if behind and _has_percent(gold) and not _has_percent(answer) else "")


def _has_percent(answer: str) -> bool:
    return answer.strip() != "" and r"\%" in canonical(answer[:2000])


@dataclass(kw_only=True)
class ExactReward(AnswerReward, TextAnswerReward):
    r"""1 if the answer, by default the last ``\boxed{…}``, equals the gold answer as a string, else 0; range {0, 1}.

    Nothing within a thought is an answer. Both sides are stripped of white space and compared without any mathematics:
    ``0.5`` is not ``1/2``. This is the rule that the first open reproductions of R1 used; `MathReward` compares values.
    """

    trusted = True
    name: str = "exact"

    def read(self, completion: str) -> Found:
        return super().read(after_thinking(completion))

    def score(self, completion: str, gold: str) -> Score:
        found = self.read(completion)
        if is_blank(found.text):
            return Score(0.0, "timeout" if found.late else "no_answer", found.note)
        same = found.text.strip() == gold.strip()
        shown = ": ".join(filter(None, [_shown(found.text), found.note]))
        return Score.of(float(same), shown)


@dataclass(kw_only=True)
class MathReward(AnswerReward, SandboxedReward):
    r"""1 if the answer, by default the last ``\boxed{…}``, means the same as the gold answer, else 0; range {0, 1}.

    ``1/2``, ``0.5`` and ``\frac12`` are the same. Written-out numbers and text answers are compared in this process;
    all else is compared by math-verify in worker processes that can be killed (see ``sandbox``), so that no answer can
    hang or crash the run or exhaust its memory. An answer that costs too much is 0 with status ``timeout``, ``killed``,
    ``crashed`` or ``too_long``; where the gold answer cannot be read, the score is ``None`` with ``bad_gold``.

    The rules on top of math-verify: a relation between numbers is no answer (``6=5`` for 5), but ``x=5`` answers 5; a
    number must be worked out (``123\cdot456`` is not, nor is ``84/7`` for 12); different units of measure differ, but a
    unit may be left out; tiny numbers must agree in relative terms; text answers are compared as text; ``\pm2`` means
    both values; undefined values are never right.
    """

    trusted = True
    name: str = "math"
    correctness: bool = True
    allow_unevaluated: bool = False
    r"""Accept expressions that are not worked out: ``123\cdot456`` for 56088. A policy may then copy the question."""
    percent: Literal["hundredth", "unit"] = "hundredth"
    r"""Meaning of ``50\%``: ``hundredth`` is 0.5, ``unit`` is 50 (for data sets that drop the sign)."""
    relative_tolerance: float = 1e-4
    """Largest |answer − gold| / |gold| of equal numbers where a decimal is involved; they must also agree to six
    decimal places."""
    ordered: bool = False
    """Lists without brackets keep their order: ``2, 1`` is not ``1, 2``. A column ``ordered`` of the data, if there is
    one, decides for each problem."""

    rules: AnswerRules = field(init=False, repr=False, compare=False)
    _bad_golds: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Gold answers that cost too much, and until when (``time.monotonic``) that is believed."""

    def __post_init__(self) -> None:
        AnswerReward.__post_init__(self)
        if self.percent not in ("hundredth", "unit"):
            raise ValueError(f"percent must be 'hundredth' or 'unit', got {self.percent!r}.")
        if not 0 <= self.relative_tolerance < 1:
            raise ValueError(f"relative_tolerance must lie in [0, 1), got {self.relative_tolerance}.")
        SandboxedReward.__post_init__(self)
        self.rules = AnswerRules(**{f.name: getattr(self, f.name) for f in fields(AnswerRules)})

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        said = list(map(after_closed_thinking, completions))
        found = list(map(self.read, said))
        pairs = list(map(_pair, answers, found, said))
        flags = columns.get("ordered", [None] * len(pairs))
        if odd := [flag for flag in flags if flag is not None and not (isinstance(flag, int) and flag in (0, 1))]:
            raise MissingColumn(f"the column 'ordered' must hold true or false, got {str(odd[0])[:40]!r}.")
        ordered = [self.ordered if flag is None else bool(flag) for flag in flags]
        verdicts = {
            flag: self._judge([pair for pair, own in zip(pairs, ordered, strict=True) if own == flag], ordered=flag)
            for flag in set(ordered)
        }
        boxed = self.answer_in in ("box", "auto")
        beside = [text_beside_box(text) if boxed else "" for text in said]
        return [
            _score(verdicts[flag][pair], replace(one, text=pair[1]), around)
            for pair, flag, one, around in zip(pairs, ordered, found, beside, strict=True)
        ]

    def read(self, completion: str) -> Found:
        """The answer of a completion; neighbouring boxes are one answer."""
        found, completion = super().read(completion), after_closed_thinking(completion)
        if self.answer_in == "box" or (self.answer_in == "auto" and r"\boxed" in completion):
            boxed = boxed_answer(completion)
            return replace(found, text=boxed.answer if boxed is not None else "")
        return found

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        """Judges every gold answer against itself."""
        golds = [_pair(gold, Found(""), "")[0] for gold in golds]
        verdicts = self._judge([(gold, gold) for gold in golds])
        faults = [self.rules.gold_fault(gold) for gold in golds]
        for i, verdict in enumerate(verdicts[gold, gold] for gold in golds):
            if not faults[i] and verdict.status not in ("ok", "unavailable"):
                faults[i] = verdict.detail if verdict.status == "bad_gold" else "not equal to itself"
        return faults

    def _judge(self, pairs: Sequence[tuple[str, str]], *, ordered: bool = False) -> dict[tuple[str, str], Verdict]:
        """The verdict on every distinct (gold, answer) pair."""
        rules = replace(self.rules, ordered=ordered)
        plans = {pair: rules.plan(*pair) for pair in dict.fromkeys(pairs)}
        hard = {pair: plan for pair, plan in plans.items() if isinstance(plan, Job)}
        verdicts = {pair: plan for pair, plan in plans.items() if isinstance(plan, Verdict)}
        judged = self._clear_of_bad_golds([(job.gold, job.answer) for job in hard.values()])
        for (pair, job), verdict in zip(hard.items(), judged, strict=True):
            verdicts[pair] = self.rules.review(job, verdict)
        self._blame_golds(verdicts, settled=hard.keys())
        return verdicts

    def _blame_golds(self, verdicts: dict[tuple[str, str], Verdict], *, settled: Collection[tuple[str, str]]) -> None:
        """Changes ``verdicts`` to ``bad_gold`` where an answer was missing or refused before its gold answer had been
        checked, and that gold answer turns out to be faulty; pairs in ``settled`` have been checked."""
        unseen = [
            pair
            for pair, verdict in verdicts.items()
            if verdict.status in ("wrong", "no_answer", "too_long")
            and pair[0] != pair[1]
            and pair not in settled
            and not self.rules.reads_at_sight(pair[0])
        ]
        golds = list(dict.fromkeys(gold for gold, _ in unseen))
        faults = dict(zip(golds, self.gold_faults(golds), strict=True)) if golds else {}
        for pair in unseen:
            if faults[pair[0]]:
                verdicts[pair] = Verdict("bad_gold", faults[pair[0]])

    def _clear_of_bad_golds(self, jobs: list[tuple[str, str]]) -> list[Verdict]:
        """The verdicts of the pool; ``bad_gold`` for all pairs of a gold answer that is too costly to compare with
        itself. So that such a gold answer costs little, however many answers there are, one pair of each goes first (a
        gold answer that looks costly with itself, any other with its first answer), and bad ones are remembered."""
        now = time.monotonic()
        bad = {gold for gold, _ in jobs if self._bad_golds.get(gold, 0.0) > now}
        first: dict[str, tuple[str, str]] = {}
        for gold, answer in jobs:
            if gold not in bad:
                first.setdefault(gold, (gold, gold if looks_costly(gold) else answer))
        verdicts = dict(zip(first.values(), self.pool.run(list(first.values())), strict=True))
        suspects = [job[0] for job in first.values() if verdicts[job].status in _COSTLY]
        alone = [(gold, gold) for gold in suspects if (gold, gold) not in verdicts]
        verdicts |= zip(alone, self.pool.run(alone), strict=True)
        for gold in suspects:
            if verdicts[gold, gold].status in _COSTLY:
                bad.add(gold)
                self._bad_golds[gold] = time.monotonic() + _REMEMBERED_S
        while len(self._bad_golds) > _REMEMBERED:
            self._bad_golds.pop(next(iter(self._bad_golds)), None)  # another thread may be doing the same
        later = [job for job in jobs if job not in verdicts and job[0] not in bad]
        verdicts |= zip(later, self.pool.run(later), strict=True)
        fault = Verdict("bad_gold", "takes too long to compare with itself")
        return [fault if job[0] in bad else verdicts[job] for job in jobs]
