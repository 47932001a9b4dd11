"""``MathReward`` and ``ExactReward``: compare the answer with the gold answer, by meaning or as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from grpo_pl.rewards.answer_reading import AnswerReward, Found
from grpo_pl.rewards.base import Columns, MissingColumn, Score, TextAnswerReward
from grpo_pl.rewards.completion_text import after_closed_thinking, after_thinking, is_blank
from grpo_pl.rewards.mathematics.answer_rules import AnswerRules, Job
from grpo_pl.rewards.mathematics.boxes import boxed_answer
from grpo_pl.rewards.mathematics.canonical import canonical
from grpo_pl.rewards.sandbox.pool import SandboxedReward, Verdict
from grpo_pl.rewards.sandbox.task_queue import looks_costly

K = TypeVar("K")
_Row = tuple[str, str, bool]
"""Gold answer, answer, and whether lists without brackets keep their order."""
_OK = Verdict("ok")
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


def _pair(gold: str, answer: str, completion: str) -> tuple[str, str]:
    """The gold answer and the answer as they are compared. A box in the gold answer is read like one in a completion;
    a percent sign behind a box belongs to it where the other side has one."""

    def has_percent(side: str) -> bool:
        return side.strip() != "" and r"\%" in canonical(side[:2000])

    of_gold = boxed_answer(gold, adjacent=True) if r"\boxed" in gold else None
    if of_gold is None and "%" not in gold and "per" not in gold and "pct" not in gold:
        return gold, answer
    boxed = boxed_answer(completion)
    behind = boxed is not None and boxed.percent
    if of_gold is not None:
        gold = of_gold.answer + (r"\%" if of_gold.percent and (behind or has_percent(answer)) else "")
    return gold, answer + (r"\%" if behind and has_percent(gold) and not has_percent(answer) else "")


def _truth(cell: Any) -> Any:
    """A text of CSV as JSON would have it: true, false, or None if it is empty; any other cell as it is."""
    return {"true": True, "false": False, "": None}.get(cell.strip().lower(), cell) if isinstance(cell, str) else cell


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
    _costly_golds: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
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
        flags = [_truth(cell) for cell in columns.get("ordered", [None] * len(said))]
        if odd := [flag for flag in flags if flag is not None and not (isinstance(flag, int) and flag in (0, 1))]:
            raise MissingColumn(f"the column 'ordered' must hold true or false, got {str(odd[0])[:40]!r}.")
        ordered = [self.ordered if flag is None else bool(flag) for flag in flags]
        rows = [
            (*_pair(gold, one.text, text), flag)
            for gold, one, text, flag in zip(answers, found, said, ordered, strict=True)
        ]
        verdicts = self._judge(rows)
        boxed = self.answer_in in ("box", "auto")
        return [
            _score(verdicts[row], replace(one, text=row[1]), text_beside_box(text) if boxed else "")
            for row, one, text in zip(rows, found, said, strict=True)
        ]

    def read(self, completion: str) -> Found:
        """The answer of a completion; neighbouring boxes are one answer."""
        found, completion = super().read(completion), after_closed_thinking(completion)
        if self.answer_in == "box" or (self.answer_in == "auto" and r"\boxed" in completion):
            boxed = boxed_answer(completion)
            return replace(found, text=boxed.answer if boxed is not None else "")
        return found

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        golds = [_pair(gold, "", "")[0] for gold in golds]
        faults = self._faults(golds)
        return [faults[gold] for gold in golds]

    def _judge(self, rows: Iterable[_Row]) -> dict[_Row, Verdict]:
        """The verdict on every distinct row. Gold answers in doubt are checked first. Of every gold answer that is
        left, one answer goes to the workers before the rest: if that costs too much, the gold answer is checked as
        well, so that a costly one costs little, however many answers there are."""
        rules = [replace(self.rules, ordered=ordered) for ordered in (False, True)]
        plans = {row: rules[row[2]].plan(row[0], row[1]) for row in dict.fromkeys(rows)}
        faults = self._faults(row[0] for row, plan in plans.items() if self._is_doubtful(row[0], plan))
        for row, plan in plans.items():
            if plan != _OK and (fault := faults.get(row[0])):
                plans[row] = Verdict("bad_gold", fault)
        verdicts = {row: plan for row, plan in plans.items() if isinstance(plan, Verdict)}
        jobs = {row: plan for row, plan in plans.items() if isinstance(plan, Job)}
        first = list({row[0]: row for row in reversed(jobs)}.values())
        verdicts |= self._ask({row: jobs[row] for row in first})
        faults |= self._faults(row[0] for row in first if verdicts[row].status in _COSTLY and row[0] not in faults)
        bad = {row: Verdict("bad_gold", fault) for row in jobs if (fault := faults.get(row[0]))}
        verdicts |= self._ask({row: job for row, job in jobs.items() if row not in verdicts and row not in bad})
        return verdicts | bad

    def _is_doubtful(self, gold: str, plan: Verdict | Job) -> bool:
        """True for a gold answer that looks or was costly, and for one that no worker sees, as the answer is refused
        without it."""
        unsure = plan != _OK
        if isinstance(plan, Job):
            unsure = gold in self._costly_golds or looks_costly(gold)
        return unsure and not self.rules.reads_at_sight(gold)

    def _faults(self, golds: Iterable[str]) -> dict[str, str]:
        """The fault of each gold answer, ``""`` for none, found by judging it against itself. One that costs too much
        is remembered, so that it costs that once, however many answers there are."""
        now, costly = time.monotonic(), "takes too long to compare with itself"
        faults = {g: costly if self._costly_golds.get(g, 0.0) > now else self.rules.gold_fault(g) for g in golds}
        plans = {gold: self.rules.plan(gold, gold) for gold, fault in faults.items() if not fault}
        jobs = {gold: plan for gold, plan in plans.items() if isinstance(plan, Job)}
        for gold, (status, detail) in self._ask(jobs).items():
            if status in _COSTLY:
                faults[gold] = costly
                self._costly_golds[gold] = time.monotonic() + _REMEMBERED_S
            elif status not in ("ok", "unavailable"):
                faults[gold] = detail or "not equal to itself"
        while len(self._costly_golds) > _REMEMBERED:
            self._costly_golds.pop(next(iter(self._costly_golds)), None)  # another thread may be doing the same
        return faults

    def _ask(self, jobs: Mapping[K, Job]) -> dict[K, Verdict]:
        """The verdicts of the workers."""
        verdicts = self.pool.run([(job.gold, job.answer + job.beside) for job in jobs.values()])
        return {key: self.rules.review(job, v) for (key, job), v in zip(jobs.items(), verdicts, strict=True)}
