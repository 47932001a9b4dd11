"""``MathReward`` and ``ExactReward``: is the last boxed answer the gold one?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_pl.rewards import answer_text as text
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.number_lists import read_number_list, same_list
from grpo_pl.rewards.sandbox import SandboxSettings, Verdict, WorkerPool, shared_pool

_ASSIGNED = re.compile(r"\s*[A-Za-z](?:_\{?\w+\}?)?\s*=(?!=)\s*([^=]+)")
_NOT_A_NUMBER = re.compile(r"\s*(?:\\text\s*\{\s*nan\s*\}|nan)\s*", re.IGNORECASE)
_COSTLY = frozenset({"timeout", "killed", "crashed"})
_OPERATORS = re.compile(r"\\(?:int|iint|sum|prod|lim|binom|tbinom|dbinom|bmod|pmod|mod|frac\{d\})(?![a-zA-Z])|!")


def _shown(answer: str) -> str:
    """``answer`` for logs: short, and free of characters that JSON files and terminals choke on."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in answer[:80])
    return clean + "…" if len(answer) > 80 else clean


def _score(verdict: Verdict, answer: str) -> Score:
    """The score of a verdict: 1 for ``ok``, nothing where the completion is not to blame, else 0."""
    status = verdict.status
    value = 1.0 if status == "ok" else None if status == "unavailable" else 0.0
    if status == "bad_gold":
        return Score(None, status, verdict.detail)  # the answer has nothing to do with it
    shown = _shown(answer)
    return Score(value, status, f"{shown}: {verdict.detail}" if verdict.detail else shown)


def _self_fault(verdict: Verdict) -> str:
    """What the verdict on a gold answer against itself says about it."""
    if verdict.status == "bad_gold":
        return verdict.detail
    return "" if verdict.status in ("ok", "unavailable") else "not equal to itself"


@dataclass(kw_only=True)
class ExactReward(Reward):
    r"""1 if the last ``\boxed{…}`` equals the gold answer as a string, else 0; range {0, 1}.

    Both sides are stripped and compared without any mathematics: ``0.5`` is not ``1/2``. This is the rule that the
    first open reproductions of R1 used; :class:`MathReward` compares values.
    """

    name: str = "exact"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = False
    """True for the one reward per config that says whether an answer is right."""

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [self._one(c, a) for c, a in zip(completions, answers, strict=True)]

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return ["" if gold.strip() else "empty" for gold in golds]

    @staticmethod
    def _one(completion: str, gold: str) -> Score:
        boxed = text.last_boxed(completion)
        if boxed is None or not boxed.strip():
            return Score(0.0, "no_answer")
        if not gold.strip():
            return Score(None, "bad_gold", "empty")
        same = boxed.strip() == gold.strip()
        return Score(1.0 if same else 0.0, "ok" if same else "wrong", _shown(boxed))


@dataclass(kw_only=True)
class MathReward(Reward):
    r"""1 if the last ``\boxed{…}`` means the same as the gold answer, else 0; range {0, 1}.

    ``1/2``, ``0.5`` and ``\frac12`` are the same. Written-out numbers and text answers are compared right here; all
    else goes to math-verify in killable worker processes (see ``sandbox``), so that no answer can hang, crash or
    swell the run. An answer that costs too much is 0 with status ``timeout``, ``killed``, ``crashed`` or
    ``too_long``; a gold answer that cannot be read is ``None`` with ``bad_gold``.

    The rules on top of math-verify: a relation between numbers answers nothing (``6=5`` for 5), ``x=5`` answers 5;
    a number must be worked out (``123\cdot456`` and ``84/7`` for 12 are not); different units of measure differ, a
    missing unit is fine; tiny numbers must agree in relative terms; text answers are compared as text; ``\pm2`` is
    both values; undefined values are never right.
    """

    name: str = "math"
    """Key of this reward in metrics, tables and files."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards."""
    correctness: bool = True
    """True for the one reward per config that says whether an answer is right."""
    allow_unevaluated: bool = False
    r"""Accept work instead of a result: ``123\cdot456`` for 56088. A policy may then copy the question."""
    percent: Literal["hundredth", "unit"] = "hundredth"
    r"""What ``50\%`` means: ``hundredth`` is 0.5, ``unit`` is 50 (for data sets that drop the sign)."""
    workers: int = 2
    """Worker processes; rewards with the same limits share them."""
    soft_limit_s: float = 1.0
    """CPU seconds after which a comparison is interrupted (status ``timeout``)."""
    hard_limit_s: float = 1.5
    """CPU seconds after which a worker that cannot be interrupted is killed (status ``killed``)."""
    memory_limit_mb: int = 2048
    """Address space of one worker in MiB."""
    max_answer_chars: int = 1000
    """Longer boxed answers are not judged (status ``too_long``)."""
    relative_tolerance: float = 1e-4
    """How far apart two numbers may be, relative to the gold one; they must agree to six places as well."""

    pool: WorkerPool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.percent not in ("hundredth", "unit"):
            raise ValueError(f"percent must be 'hundredth' or 'unit', got {self.percent!r}.")
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars must be at least 1, got {self.max_answer_chars}.")
        if not 0 <= self.relative_tolerance < 1:
            raise ValueError(f"relative_tolerance must lie in [0, 1), got {self.relative_tolerance}.")
        settings = SandboxSettings(
            workers=self.workers,
            soft_limit_s=self.soft_limit_s,
            hard_limit_s=self.hard_limit_s,
            memory_limit_mb=self.memory_limit_mb,
            relative_tolerance=self.relative_tolerance,
        )
        self.pool = shared_pool(settings)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        found = [text.last_boxed(completion) or "" for completion in completions]
        pairs = list(zip(answers, found, strict=True))
        verdicts = self._judge(pairs)
        return [_score(verdicts[pair], pair[1]) for pair in pairs]

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        """Judges every gold answer against itself."""
        verdicts = self._judge([(gold, gold) for gold in golds])
        return [self._gold_fault(gold) or _self_fault(verdicts[gold, gold]) for gold in golds]

    def start(self) -> None:
        self.pool.start()

    def close(self) -> None:
        """Ends the workers, for all rewards that share them; whoever needs them again starts new ones."""
        self.pool.close()

    def _judge(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Verdict]:
        """The verdict on every distinct (gold, answer) pair."""
        plans = {pair: self._plan(*pair) for pair in dict.fromkeys(pairs)}
        hard = {pair: plan for pair, plan in plans.items() if not isinstance(plan, Verdict)}
        verdicts = {pair: plan for pair, plan in plans.items() if isinstance(plan, Verdict)}
        judged = self._clear_of_bad_golds(list(hard.values()))
        for (pair, job), verdict in zip(hard.items(), judged, strict=True):
            verdicts[pair] = self._review(job, verdict)
        return verdicts

    def _plan(self, gold_text: str, answer: str) -> Verdict | tuple[str, str]:
        """The verdict where it needs no algebra, else the job for the pool."""
        if not answer.strip():
            return Verdict("no_answer")
        if reason := text.oversize(answer, self.max_answer_chars):
            return Verdict("too_long", reason)
        if text.has_control_characters(answer):
            return Verdict("wrong", "control characters")
        if _NOT_A_NUMBER.fullmatch(answer):
            return Verdict("wrong", "undefined value")
        if fault := self._gold_fault(gold_text):
            return Verdict("bad_gold", fault)
        gold, mine = text.canonical(gold_text), text.canonical(answer)
        if "=" not in gold and (assigned := _ASSIGNED.fullmatch(mine)):
            mine = assigned[1]
        (gold, gold_unit), (mine, unit) = text.split_unit(gold), text.split_unit(mine)
        if gold_unit != unit and text.is_measure(gold_unit) and text.is_measure(unit):
            return Verdict("wrong", f"unit {unit}, expected {gold_unit}")
        return self._compare_text(gold, mine) or (self._for_worker(gold), self._for_worker(mine))

    def _clear_of_bad_golds(self, jobs: list[tuple[str, str]]) -> list[Verdict]:
        """The verdicts of the pool; where one cost too much, the gold answer is judged alone, as it may be the bomb."""
        verdicts = self.pool.run(jobs)
        suspects = [gold for (gold, _), v in zip(jobs, verdicts, strict=True) if v.status in _COSTLY]
        alone = dict(zip(suspects, self.pool.run([(gold, gold) for gold in suspects]), strict=True))
        bad = {gold for gold, verdict in alone.items() if verdict.status in _COSTLY}
        fault = Verdict("bad_gold", "takes too long to compare with itself")
        return [fault if gold in bad else verdict for (gold, _), verdict in zip(jobs, verdicts, strict=True)]

    def _gold_fault(self, gold: str) -> str:
        if not gold.strip():
            return "empty"
        if _NOT_A_NUMBER.fullmatch(gold):
            return "undefined value"
        if text.has_control_characters(gold):
            return "control characters"
        return text.oversize(gold, self.max_answer_chars)

    def _compare_text(self, gold: str, answer: str) -> Verdict | None:
        """The verdict on numbers that are written out and on words; ``None`` if it takes algebra."""
        hundredth = self.percent == "hundredth"
        gold_number = text.read_number(gold, percent_is_hundredth=hundredth)
        number = text.read_number(answer, percent_is_hundredth=hundredth)
        if gold_number is not None and number is not None:
            return Verdict("ok" if self._same_number(gold_number, number) else "wrong")
        gold_list = read_number_list(gold, percent_is_hundredth=hundredth)
        numbers = read_number_list(answer, percent_is_hundredth=hundredth)
        if gold_list is not None and numbers is not None:
            same = same_list(gold_list, numbers, self._same_number)
            return None if same is None else Verdict("ok" if same else "wrong")
        gold_words, words = text.as_words(gold), text.as_words(answer)
        if gold_words is not None:
            if gold_words == (words if words is not None else answer.strip()):
                return Verdict("ok")
            return Verdict("wrong") if words is not None or len(gold_words) > 1 else None
        if gold_number is not None and words is not None:
            return Verdict("wrong", "words where a number was asked for")
        return None

    def _same_number(self, gold: text.Number, answer: text.Number) -> bool:
        """Equal, and worked out: 84/7 is not an answer to 12."""
        left_to_divide = answer.quotient and not gold.quotient and gold.value.denominator == 1
        if left_to_divide and not self.allow_unevaluated:
            return False
        return text.same_number(gold, answer, self.relative_tolerance)

    def _for_worker(self, side: str) -> str:
        r"""``side`` with percent signs and ``\pm`` written out, which math-verify reads in more than one way."""
        replacement = r"\\frac{\1}{100}" if self.percent == "hundredth" else r"\1"
        side = re.sub(r"(\d+(?:\.\d+)?)\s*\\%", replacement, side)
        if side.count(r"\pm") == 1:
            side = ",".join(side.replace(r"\pm", sign) for sign in "+-")
        return side

    def _review(self, job: tuple[str, str], verdict: Verdict) -> Verdict:
        """Takes back an ``ok`` for an answer that leaves the work to the verifier."""
        gold, answer = job
        if verdict.status != "ok" or self.allow_unevaluated:
            return verdict
        plain_numbers = text.is_worked_out(gold) and re.search(r"\d", gold)
        undone = plain_numbers and not text.is_worked_out(answer)
        if undone or (_OPERATORS.search(answer) and not _OPERATORS.search(gold)):
            return Verdict("wrong", "not worked out")
        return verdict
