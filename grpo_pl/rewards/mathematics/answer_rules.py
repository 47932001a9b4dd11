"""The rules of ``MathReward`` that need no algebra, and the jobs for math-verify where algebra is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from grpo_pl.rewards.completion_text import has_balanced_braces
from grpo_pl.rewards.mathematics import notation, units
from grpo_pl.rewards.mathematics.canonical import canonical, has_compatibility_markup, has_control_characters, oversize
from grpo_pl.rewards.mathematics.words import as_words, is_equation, split_name
from grpo_pl.rewards.mathematics.written_numbers import (
    Number,
    is_worked_out,
    number_in_words,
    read_number,
    same_number,
)
from grpo_pl.rewards.sandbox.pool import Verdict

LIST, TUPLE, SET = "\1", "\2", "\3"
"""Marks between the items of lists for the worker; answers that hold control characters do not get there."""
_NOT_A_NUMBER = re.compile(r"\s*(?:\\text\s*\{\s*nan\s*\}|nan)\s*", re.IGNORECASE)
_NUMBER_AS_TEXT = re.compile(r"\\text\s*\{\s*([-+]?[\d.,/]+)\s*\}")
_INNER_UNIT = re.compile(r"(?<=[\d}])\s*\\text\s*\{([^{}]*)\}(?:\s*\^\s*\{?[23]\}?)?")
_MEMBERS = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?|\([A-Za-z](?:\s*,\s*[A-Za-z])+\))\s*(=|\\in)\s*(\(.*|\\\{.*|\[.*)")
_CONDITION = re.compile(r"\\(?:land|lor)(?![a-zA-Z])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_CHOICE = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(\s*([A-J])\s*\)|([A-J])[).:])\s*+\}?+\s*+"
    r"(?![-+*/^_=<>,;:!|]|\\(?:cdot|times|div|pm|le|ge|ne|cup|cap|in|to|land|lor)(?![a-zA-Z]))(\S.*)"
)
_LONG_DECIMAL = re.compile(r"-?\d*\.\d{6,}")
_IRRATIONAL = re.compile(
    r"-?\s*(?:\d+\s*)?(?:\\sqrt\s*(?:\[\d\]\s*)?(?:\{\d+\}|\d)|\\pi)(?:\s*/\s*\d+)?"
    r"|-?\s*\\frac\s*\{\s*(?:\d+\s*)?(?:\\sqrt\s*(?:\{\d+\}|\d)|\\pi)\s*\}\s*\{\s*\d+\s*\}"
)
"""Numbers without a last digit: a root or a multiple of π, which needs no more work where a decimal is asked for."""
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_PERIODIC = re.compile(r"(\d*\.\d*)\\overline\s*\{(\d+)\}")
_NEARBY = Fraction(1, 20)
"""Largest relative error of the approximation that an answer adds to its exact value (``exact ≈ approximation``)."""
_NOTATIONS: dict[Callable[[str], object | None], bool] = {
    notation.sets: False,
    notation.points: True,
    notation.ratio: True,
    notation.chain: False,
}
"""Reads what a notation says -> whether sides that say different things are wrong, without asking math-verify."""
_UNREADABLE = ("cannot be parsed", "not equal to itself", "cannot be compared")


@dataclass(frozen=True)
class Job:
    """A pair that needs algebra: the contents of two boxes, for math-verify in a worker process."""

    gold: str
    answer: str
    repeated: bool = False
    """The answer has the same symbols as the gold one; the worker only checks that they have a meaning."""


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """The rules of ``MathReward``, which documents its fields."""

    percent: Literal["hundredth", "unit"]
    allow_unevaluated: bool
    max_answer_chars: int
    relative_tolerance: float
    ordered: bool = False

    def gold_fault(self, gold: str) -> str:
        """The fault of a gold answer's text, or ``""``; does not parse it as mathematics."""
        if not gold.strip():
            return "empty"
        if _NOT_A_NUMBER.fullmatch(gold):
            return "undefined value"
        if has_control_characters(gold):
            return "control characters"
        if reason := oversize(gold, self.max_answer_chars):
            return reason
        form = canonical(gold)
        if not (has_balanced_braces(gold) and has_balanced_braces(form)):
            return "unbalanced braces"
        return "an operator without its other side" if notation.is_malformed(form) else ""

    def plan(self, gold_text: str, answer_text: str) -> Verdict | Job:
        """The verdict if no algebra is needed, else the job for the pool of workers."""
        if _NOT_A_NUMBER.fullmatch(answer_text):  # never right, not even for itself
            return Verdict("wrong", "undefined value")
        if fault := self.gold_fault(gold_text):
            return Verdict("bad_gold", fault)
        if not answer_text.strip():
            return Verdict("no_answer")
        if reason := oversize(answer_text, self.max_answer_chars):
            return Verdict("too_long", reason)
        if has_control_characters(answer_text):
            return Verdict("wrong", "control characters")
        if has_compatibility_markup(answer_text) and answer_text.strip() != gold_text.strip():
            return Verdict("wrong", "look-alikes of braces or backslashes")
        gold, answer = canonical(gold_text), canonical(answer_text)
        if not has_balanced_braces(answer):
            return Verdict("wrong", "unbalanced braces")
        if notation.symbols(gold) == notation.symbols(answer):
            return self._repeated(gold)
        if r"\boxed" in answer:
            return Verdict("wrong", "a box in the box")
        return self._compare(gold, answer)

    def reads_at_sight(self, gold_text: str) -> bool:
        """True if the gold answer can be judged against for sure, without asking a worker."""
        if len(gold_text) > self.max_answer_chars:
            return False
        gold = canonical(gold_text)
        return self._is_plain(gold) or self._is_plain(units.split_unit(gold)[0])

    def review(self, job: Job, verdict: Verdict) -> Verdict:
        """Corrects the verdict of a worker: an ``ok`` for an answer that is not worked out becomes ``wrong``; where
        math-verify cannot read the gold answer but a person can, repeating its symbols is ``ok`` and all else
        ``wrong``."""
        unread = verdict.status == "bad_gold" and verdict.detail.startswith(_UNREADABLE)
        scored = verdict.detail == "undefined value" and ":" in job.gold and "frac" not in job.gold  # 3:0
        if (unread or scored) and notation.is_notation(job.gold):
            return Verdict("ok") if job.repeated else Verdict("wrong", "not the gold answer by its symbols")
        if job.repeated and verdict.status == "wrong" and verdict.detail != "undefined value":
            return Verdict("ok")
        if verdict.status != "ok" or self.allow_unevaluated or job.repeated:
            return verdict
        plain_numbers = is_worked_out(job.gold) and re.search(r"\d", job.gold)
        exact = _LONG_DECIMAL.fullmatch(job.gold) and _IRRATIONAL.fullmatch(job.answer)
        undone = plain_numbers and not exact and not is_worked_out(job.answer)
        if undone or notation.leaves_work(job.gold, job.answer):
            return Verdict("wrong", "not worked out")
        return verdict

    def _repeated(self, gold: str) -> Verdict | Job:
        if self._is_plain(gold) or notation.is_date(gold) or notation.clock(gold):
            return Verdict("ok")
        side = self._for_worker(gold)
        return Job(side, side, repeated=True)

    def _is_plain(self, side: str) -> bool:
        """True for a written-out number, a list of such numbers, and words."""
        return self._number(side) is not None or as_words(side) is not None or self._is_number_list(side)

    def _number(self, side: str) -> Number | None:
        return read_number(side, percent_is_hundredth=self.percent == "hundredth")

    def _is_number_list(self, side: str) -> bool:
        """True for two or more written-out numbers, in brackets or without, that cannot be one with commas."""
        _, items, unsure = notation.read_list(side)
        return len(items) > 1 and not unsure and None not in map(self._number, items)

    def _compare(self, gold: str, answer: str) -> Verdict | Job:
        """The verdict on two canonical answers that differ in their symbols."""
        if verdict := self._compare_notation(gold, answer):
            return verdict
        if choice := self._compare_choices(gold, answer):
            return choice
        (gold, _), (answer, near) = notation.exact_side(gold), notation.exact_side(answer)
        if near and not self._is_near(answer, near):
            return Verdict("wrong", "no approximation")
        if _CONDITION.search(gold + answer):
            return self._compare_conditions(gold, answer)
        if is_equation(answer) and "=" not in gold:
            return Verdict("wrong", "an equation where a value was asked for")
        (gold_name, gold), (name, answer) = self._without_names(gold, answer)
        if gold_name and name and gold_name != name:
            return Verdict("wrong", f"{name} where {gold_name} was asked for")
        if (gold_name or name) and notation.symbols(gold) == notation.symbols(answer):
            return self._repeated(gold)
        if r"\text" in gold and units.in_one_spelling(gold) == units.in_one_spelling(answer):
            return self._repeated(gold)  # 1 hour 30 minutes
        (gold, gold_unit), (answer, unit) = units.split_unit(gold), units.split_unit(answer)
        if gold_unit and unit and not units.same_unit(gold_unit, unit):
            return Verdict("wrong", f"unit {unit}, expected {gold_unit}")
        if not gold_unit and not units.is_known(unit):
            return Verdict("wrong", f"{unit!r} is neither a unit nor a noun that may follow a number")
        gold, answer = without_inner_units(answer, gold), without_inner_units(gold, answer)
        if match := _NUMBER_AS_TEXT.fullmatch(answer):
            answer = match[1]
        if (aligned := notation.align_assignments(gold, answer)) is not None:
            gold, answer = aligned
            if not answer:
                return Verdict("wrong", "other names")
        elif (named := _MEMBERS.fullmatch(answer)) and not _MEMBERS.fullmatch(gold) and "=" not in gold + named[3]:
            answer = named[3]
        verdict = self._compare_text(gold, answer) or self._objection(gold, answer)
        return verdict or self._compare_lists(gold, answer) or Job(self._for_worker(gold), self._for_worker(answer))

    def _compare_choices(self, gold: str, answer: str) -> Verdict | Job | None:
        """The verdict where one side is a choice with its text, ``(C) 7``, and the other the letter, or both are;
        ``None`` for anything else."""
        choices = [_read_choice(side) for side in (gold, answer)]
        sides = zip(choices, (gold, answer), strict=True)
        letters = [choice[0] if choice else as_words(side) or side for choice, side in sides]
        if not any(choices) or not all(re.fullmatch("[A-J]", letter) for letter in letters):
            return None
        if letters[0] != letters[1]:
            return Verdict("wrong", "another choice")
        return self._compare(choices[0][1], choices[1][1]) if choices[0] and choices[1] else Verdict("ok")

    def _compare_conditions(self, gold: str, answer: str) -> Verdict | Job:
        r"""The verdict where one side joins conditions with "and" or "or": ``x<1 \lor x>3``. Commas between conditions
        mean what the other side says."""
        sides = []
        for side, other in ((gold, answer), (answer, gold)):
            words = set(_CONDITION.findall(other))
            if not _CONDITION.search(side) and len(words) == 1:
                parts = notation.split_top(side)
                if len(parts) > 1 and all(_RELATION.search(part) for part in parts):
                    side = f" {words.pop()} ".join(parts)
            sides.append(side)
        return self._objection(*sides) or Job(self._for_worker(sides[0]), self._for_worker(sides[1]))

    def _without_names(self, gold: str, answer: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """``(name, value)`` of both sides, where at least one is ``name = value`` and the other the same or a value;
        names are ``""`` where the sides are to be compared as they stand."""
        of_gold, of_answer = split_name(gold), split_name(answer)
        if of_gold[0] and of_answer[0]:
            # other letters, and y for f(x), are for the worker
            plain = all(re.fullmatch(r"[A-Za-z](?:\([a-z]\))?", name) for name, _ in (of_gold, of_answer))
            return (("", gold), ("", answer)) if plain and of_gold[0] != of_answer[0] else (of_gold, of_answer)
        if (of_gold[0] and "=" in answer) or (of_answer[0] and "=" in gold):
            return ("", gold), ("", answer)
        return of_gold, of_answer

    def _compare_lists(self, gold: str, answer: str) -> Verdict | Job | None:
        """The verdict on two lists, or the job that compares them item by item; ``None`` if one side is no list.

        Sets are written with braces. A list without brackets is a set that keeps its duplicates, or with ``ordered`` a
        tuple. Thousands and lists are both written with commas: ``2,100`` is what the other side is.
        """
        (gold_kind, golds, gold_unsure), (kind, answers, unsure) = notation.read_list(gold), notation.read_list(answer)
        kinds, single_gold, single = {gold_kind, kind}, len(golds) == 1, len(answers) == 1
        if kinds == {"()", "{}"} and not (single_gold or single):
            return Verdict("wrong", "a tuple or interval is no set of its numbers")
        if len(kinds) > 1 and kinds & {"(]", "[)"}:
            listed = any(k in ("", "{}") and len(n) > 1 for k, n in ((gold_kind, golds), (kind, answers)))
            return Verdict("wrong", "a half-open interval is no list of numbers") if listed else None
        may_be_interval = kinds in ({"[]"}, {"(]"}, {"[)"})
        if not (may_be_interval or kinds in ({""}, {"{}"}, {"()"}, {"", "{}"}, {"", "()"})) or "" in (*golds, *answers):
            return None
        if (gold_unsure and unsure) or (gold_unsure and single) or (unsure and single_gold):
            return None
        if (single_gold and gold_kind != "{}") and (single and kind != "{}"):
            return None
        if (single_gold and kind == "()") or (single and gold_kind == "()"):
            return None
        if kinds == {"{}"}:
            mark = SET
        else:
            mark = TUPLE if gold_kind == "()" or may_be_interval or (self.ordered and "{}" not in kinds) else LIST
        numbers = [[number for item in side if (number := self._number(item))] for side in (golds, answers)]
        are_numbers = [*map(len, numbers)] == [len(golds), len(answers)]
        if not are_numbers:
            if may_be_interval or kinds == {"()"}:
                return None
            # each \pm is written out as two items
            golds, answers = (
                tuple(part for item in side for part in notation.split_top(self._for_worker(item)))
                for side in (golds, answers)
            )
        if mark != SET and len(golds) != len(answers):
            return Verdict("wrong", f"{len(answers)} answers, expected {len(golds)}")
        if are_numbers:
            return Verdict("ok" if self._same_numbers(*numbers, mark=mark) else "wrong")
        return Job(mark.join(golds), mark.join(answers))

    def _same_numbers(self, golds: Sequence[Number], answers: Sequence[Number], *, mark: str) -> bool:
        """True if two lists agree; sets have neither order nor duplicates, lists have duplicates."""
        if mark == SET:
            golds, answers = ([*{number.value: number for number in side}.values()] for side in (golds, answers))
        if mark != TUPLE:
            golds, answers = (sorted(side, key=lambda number: number.value) for side in (golds, answers))
        return len(golds) == len(answers) and all(map(self._same_number, golds, answers))

    def _compare_notation(self, gold: str, answer: str) -> Verdict | None:
        """The verdict on times of day, dates, numbers in other bases and chains of inequalities, which are compared by
        their notation; ``None`` for anything else."""
        if notation.is_date(gold):
            return Verdict("wrong", "another date")
        if ":" in answer and (time := notation.clock(gold)):
            return Verdict("ok") if time == notation.clock(answer) else Verdict("wrong", "another time")
        formula = notation.chemical_formula(gold) if r"\text" in gold + answer else None
        if formula is not None and formula == notation.chemical_formula(answer):
            return Verdict("ok")
        for read, decides in _NOTATIONS.items():
            ours, theirs = read(gold), read(answer)
            if ours is not None and theirs is not None and (decides or ours == theirs):
                return Verdict("ok" if ours == theirs else "wrong")
        if notation.read_base(gold) or notation.read_base(answer):  # either side may leave out base ten
            (gold_digits, gold_base), (digits, base) = (
                notation.read_base(side) or (notation.symbols(side).upper(), 0) for side in (gold, answer)
            )
            if gold_digits == digits and (gold_base == base or not base or {gold_base, base} == {0, 10}):
                return Verdict("ok")  # an answer may leave out any base
            return Verdict("wrong", "another number or base")
        return None

    def _is_near(self, exact: str, near: str) -> bool:
        r"""True if ``exact \approx near`` is consistent: ``near`` is a number, and within ``_NEARBY`` of ``exact``
        where that is a written-out number."""
        value, rounded = self._number(exact.rpartition("=")[2].strip()), self._number(units.split_unit(near)[0])
        if rounded is None:
            return False
        return value is None or abs(value.value - rounded.value) <= _NEARBY * abs(value.value)

    def _objection(self, gold: str, answer: str) -> Verdict | None:
        """The verdict on an answer that cannot be right, whatever its value; else ``None``."""
        if sorted(notation.remarks(answer)) != sorted(notation.remarks(gold)) and notation.remarks(answer):
            return Verdict("wrong", "words beside the answer")
        if notation.numbers_below(answer) - notation.numbers_below(gold):
            return Verdict("wrong", "another base or index")
        if notation.cross_products(gold) != notation.cross_products(answer):
            return Verdict("wrong", "another product of vectors")
        if notation.computes_with_infinity(answer) and not notation.computes_with_infinity(gold):
            return Verdict("wrong", "arithmetic with infinity")
        return None

    def _compare_text(self, gold: str, answer: str) -> Verdict | None:
        """The verdict on written-out numbers and on words; ``None`` if algebra is needed."""
        gold_number, number = self._number(gold), self._number(answer)
        gold_pointed, pointed = (self._number(notation.decimal_comma(side) or "") for side in (gold, answer))
        if self._same_number(gold_pointed, pointed or number):
            return Verdict("ok")
        if gold_number is not None and number is not None:
            return Verdict("ok" if self._same_number(gold_number, number) else "wrong")
        if gold_number is not None and gold_number.decimal and self._same_number(gold_number, pointed):
            return Verdict("ok")
        gold_words, words = as_words(gold), as_words(answer)
        if gold_words is not None:
            if number is not None and (named := number_in_words(gold_words)):
                return Verdict("ok" if self._same_number(named, number) else "wrong")
            same = gold_words == (answer.strip() if words is None else words)
            if not same and words is not None and not self.ordered:
                same = sorted(map(str.strip, gold_words.split(","))) == sorted(map(str.strip, words.split(",")))
            if not same and words is None and len(gold_words) == 1:
                return None
            return Verdict("ok" if same else "wrong")
        if gold_number is None:
            return None
        if words is not None:
            right = self._same_number(gold_number, number_in_words(words))
            return Verdict("ok") if right else Verdict("wrong", "words where a number was asked for")
        if self._is_number_list(answer) and not notation.read_list(gold)[2]:
            return Verdict("wrong", "several numbers where one was asked for")  # [5,5]
        if gold_number.value.denominator == 1 and ":" in answer:
            return None if self.allow_unevaluated else Verdict("wrong", "not worked out")  # 8:2
        return None

    def _same_number(self, gold: Number | None, answer: Number | None) -> bool:
        """True if both are numbers, equal, and the answer is worked out: 84/7 is no answer where 12 is asked for."""
        if gold is None or answer is None:
            return False
        left_to_divide = answer.quotient and not gold.quotient and gold.value.denominator == 1
        if left_to_divide and not self.allow_unevaluated:
            return False
        return same_number(gold, answer, self.relative_tolerance)

    def _for_worker(self, side: str) -> str:
        r"""``side`` with percent signs, ``\pm`` and periods of decimals written out, which math-verify reads in several
        ways or not at all."""
        replacement = r"\\frac{\1}{100}" if self.percent == "hundredth" else r"\1"
        side = re.sub(r"(\d+(?:\.\d+)?)\s*\\%", replacement, side)
        side = _PERIODIC.sub(_as_fraction, side)
        if units.ANGLE_OF.search(side):
            side = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", side)
        if side.count(r"\pm") == 1:
            side = ",".join(side.replace(r"\pm", sign) for sign in "+-")
        return side


def _as_fraction(decimal: re.Match[str]) -> str:
    r"""``\frac{1}{6}`` for ``0.1\overline{6}``."""
    number = read_number(decimal.group())
    return decimal.group() if number is None else rf"\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"


def _read_choice(side: str) -> tuple[str, str] | None:
    r"""``(letter, text)`` of a choice with a number or formula behind it, such as ``(C) 7`` and ``\text{C. } x+1``."""
    match = _CHOICE.fullmatch(side)
    if match is None or r"\text" in match[3] or not re.search(r"\d", match[3]) or re.search(r"\([A-J]\)", match[3]):
        return None
    return match[1] or match[2], match[3]


def without_inner_units(gold: str, answer: str) -> str:
    r"""``answer`` without the units of measure in its parts if the other side, ``gold``, has none: ``3, 4`` for
    ``3\text{ cm}, 4``."""
    if r"\text" in gold or len(notation.split_top(answer)) < len(notation.remarks(answer)) or "," not in answer:
        return answer

    def cut(match: re.Match[str]) -> str:
        unit = units.split_unit("1" + match.group())[1]
        return "" if units.is_measure(unit) else match.group()

    return _INNER_UNIT.sub(cut, answer)
