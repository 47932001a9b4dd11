"""The rules of ``MathReward`` that need no algebra, and the jobs for math-verify where algebra is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_pl.rewards.completion_text import has_balanced_braces
from grpo_pl.rewards.mathematics import notation, units
from grpo_pl.rewards.mathematics.canonical import canonical, has_compatibility_markup, has_control_characters, oversize
from grpo_pl.rewards.mathematics.words import as_words, is_equation, same_words, split_name
from grpo_pl.rewards.mathematics.written_numbers import (
    Number,
    is_worked_out,
    number_in_words,
    read_number,
    same_number,
)
from grpo_pl.rewards.sandbox.pool import Verdict

LIST, TUPLE, SET, NEAR, WHERE = "\1", "\2", "\3", "\4", "\5"
"""Marks for the worker between the items of lists, and before an approximation or a condition; answers that hold
control characters do not get there."""
ANY_INTEGER = "n_{integer}"
_NOT_A_NUMBER = re.compile(r"\s*(?:\\text\s*\{\s*nan\s*\}|nan)\s*", re.IGNORECASE)
_INNER_UNIT = re.compile(r"(?<=[\d}])\s*\\text\s*\{([^{}]*)\}(?:\s*\^\s*\{?[23]\}?)?")
_MEMBERS = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?|\([A-Za-z](?:\s*,\s*[A-Za-z])+\))\s*(=|\\in)\s*(\(.*|\\\{.*|\[.*)")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_CHOICE = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\(\s*([A-J])\s*\)|([A-J])[).:])\s*+\}?+\s*+"
    r"(?![-+*/^_=<>,;:!|]|\\(?:cdot|times|div|pm|le|ge|ne|cup|cap|in|to|land|lor)(?![a-zA-Z]))(\S.*)"
)
_OPTION = re.compile(r"^(?:\\text\s*\{\s*)?(?:option|choice|answer)\s*:?\s*\}?\s*\(?([A-J])\)?\s*\}?$", re.IGNORECASE)
_LONG_DECIMAL = re.compile(r"-?\d*\.\d{6,}")
_IRRATIONAL = re.compile(
    r"-?\s*(?:\d+\s*)?(?:\\sqrt\s*(?:\[\d\]\s*)?(?:\{\d+\}|\d)|\\pi)(?:\s*/\s*\d+)?"
    r"|-?\s*\\frac\s*\{\s*(?:\d+\s*)?(?:\\sqrt\s*(?:\{\d+\}|\d)|\\pi)\s*\}\s*\{\s*\d+\s*\}"
)
"""Numbers without a last digit: a root or a multiple of π, which needs no more work where a decimal is asked for."""
_DEGREES = re.compile(r"(?<!\d)(\d++(?:\.\d++)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_SCALAR = re.compile(
    r"[+-]?\s*(?:(?<!\d)\d++(?:/\d++)?|\\frac\s*\{-?\d+\}\s*\{\d+\})\s*(?:\\cdot|\\times)?\s*(?=\(?\\begin)"
)
_LETTERS = re.compile(r"\s*[A-J](?:[\s,]*[A-J])+\s*")
_HALF_OF_DAY = re.compile(r"(.*\d)\s*\\text\s*\{\s*([ap])\.?\s*m\.?\s*\}", re.IGNORECASE)
_NOTATIONS: dict[Callable[[str], object | None], bool] = {
    notation.sets: False,
    notation.points: True,
    notation.ratio: True,
    notation.chain: False,
}
"""Reads what a notation says -> whether sides that say different things are wrong, without asking math-verify."""
_OK = Verdict("ok")
_UNREADABLE = ("cannot be parsed", "not equal to itself", "cannot be compared")


@dataclass(frozen=True)
class Job:
    """A pair that needs algebra: the contents of two boxes, for math-verify in a worker process."""

    gold: str
    answer: str
    repeated: bool = False
    """The answer has the same symbols as the gold one; the worker only checks that they have a meaning."""
    beside: str = ""
    """An approximation or a condition that the answer adds, with its mark."""


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
        undone = plain_numbers and not exact and not is_worked_out(_SCALAR.sub("", job.answer))
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
        """True for two or more written-out numbers, in brackets or without."""
        items = notation.read_list(side)[1]
        return len(items) > 1 and None not in map(self._number, items)

    def _compare(self, gold: str, answer: str) -> Verdict | Job:
        """The verdict on two canonical answers that differ in their symbols."""
        if verdict := self._compare_notation(gold, answer):
            return verdict
        if choice := self._compare_choices(gold, answer):
            return choice
        beside = ""
        (gold, _), (answer, near) = notation.exact_side(gold), notation.exact_side(answer)
        if near:
            beside = NEAR + units.split_unit(near)[0]
        gold, answer = notation.general_solutions(gold, answer, ANY_INTEGER)
        (value, condition), (_, of_gold) = notation.split_condition(answer), notation.split_condition(gold)
        if condition and not of_gold and not _RELATION.search(gold):
            answer, beside = value, WHERE + condition + beside
        found = self._compare_values(gold, answer)
        if beside and found == _OK:
            found = Job(self._for_worker(gold), self._for_worker(answer))
        return replace(found, beside=beside, repeated=False) if beside and isinstance(found, Job) else found

    def _compare_values(self, gold: str, answer: str) -> Verdict | Job:
        """As `_compare`, without what an answer adds to its value."""
        if is_equation(answer) and "=" not in gold:
            return Verdict("wrong", "an equation where a value was asked for")
        (gold_name, gold), (name, answer) = self._without_names(gold, answer)
        if gold_name and name and gold_name != name:
            return Verdict("wrong", f"{name} where {gold_name} was asked for")
        if (amounts := self._compare_amounts(gold, answer)) is not None:
            return amounts
        gold, answer = self._in_one_form(gold, answer)
        if notation.symbols(gold) == notation.symbols(answer):
            return self._repeated(gold)
        (gold, gold_unit), (answer, unit) = units.split_unit(gold), units.split_unit(answer)
        if "degree" in (gold_unit, unit) and {gold_unit, unit} <= {"degree", "rad", ""} and r"\pi" in gold + answer:
            gold, answer = (
                rf"\frac{{{side}\pi}}{{180}}" if name == "degree" and r"\pi" not in side else side
                for side, name in ((gold, gold_unit), (answer, unit))
            )
            gold_unit = unit = ""
        if gold_unit and unit and not units.same_unit(gold_unit, unit):
            return Verdict("wrong", f"unit {unit}, expected {gold_unit}")
        if not gold_unit and not units.is_known(unit, answer):
            return Verdict("wrong", f"{unit!r} is neither a unit nor a noun that may follow a number")
        gold, answer = without_inner_units(answer, gold), without_inner_units(gold, answer)
        if (aligned := notation.align_assignments(gold, answer)) is not None:
            gold, answer = aligned
        elif (named := _MEMBERS.fullmatch(answer)) and not _MEMBERS.fullmatch(gold) and "=" not in named[3]:
            answer = named[3]
        verdict = self._compare_text(gold, answer) or self._objection(gold, answer)
        if not verdict and sum(map(self._are_conditions, (gold, answer))) == 1 and r"\cup" in gold + answer:
            return Job(self._for_worker(gold), self._for_worker(answer))
        return verdict or self._compare_lists(gold, answer) or Job(self._for_worker(gold), self._for_worker(answer))

    @staticmethod
    def _are_conditions(side: str) -> bool:
        parts = notation.split_top(side)
        return len(parts) > 1 and all(map(_RELATION.search, parts))

    def _compare_amounts(self, gold: str, answer: str) -> Verdict | None:
        r"""The verdict on amounts in a row, each with what it counts, such as ``2\text{ hours }30\text{ minutes}``;
        with commas between them on both sides they are a list without order. ``None`` for anything else."""
        (golds, gold_listed), (answers, listed) = units.amounts(gold), units.amounts(answer)
        if (not golds and (listed or not answers)) or (not answers and gold_listed):
            return None
        left = list(answers)
        for number, unit in golds:
            right = [
                (n, u)
                for n, u in (left if gold_listed and listed else left[:1])
                if (u == unit or (u and unit and units.same_unit(unit, u)))
                and self._same_number(self._number(number), self._number(n))
            ]
            if not right:
                return Verdict("wrong", "other amounts")
            left.remove(right[0])
        return Verdict("wrong", "further amounts") if left else _OK

    def _in_one_form(self, gold: str, answer: str) -> tuple[str, str]:
        """Both sides with what may be written in several ways, as the other side shows, written in one: numbers with
        spaces between, the parts of a question, vectors, unions, and rows with dots."""
        parts = [notation.parts(side) for side in (gold, answer)]
        if any(parts):
            lists = (part or notation.read_list(side)[1] for part, side in zip(parts, (gold, answer), strict=True))
            gold, answer = (f"({', '.join(items)})" if len(items) > 1 else items[0] for items in lists)
        gold, answer = (notation.without_dots(notation.with_commas(side)) for side in (gold, answer))
        if r"\cup" in gold and r"\cup" not in answer:
            answer = notation.as_union(answer)
        vectors = [notation.as_tuple(side) for side in (gold, answer)]
        matrices = [r"\begin" in side for side in (gold, answer)]
        if any(vectors) and matrices != [True, True]:
            kinds = [notation.read_list(side)[0] for side in (gold, answer)]
            are_tuples = all(vector or kind == "()" for vector, kind in zip(vectors, kinds, strict=True))
            if are_tuples and (any(matrices) or "" in kinds):
                gold, answer = (vector or side for vector, side in zip(vectors, (gold, answer), strict=True))
        return gold, answer

    def _compare_choices(self, gold: str, answer: str) -> Verdict | Job | None:
        """The verdict where one side is a choice with its text, ``(C) 7``, and the other the letter, or both are;
        ``None`` for anything else."""
        letters = [re.sub("[^A-J]", "", side) if _LETTERS.fullmatch(side) else "" for side in (gold, answer)]
        if all(letters) and "," in gold + answer and all(len({*side}) == len(side) for side in letters):
            return Verdict("ok" if sorted(letters[0]) == sorted(letters[1]) else "wrong")  # AC for A, C
        named = any(map(_OPTION.search, (gold, answer)))
        gold, answer = (_OPTION.sub(lambda option: option[1].upper(), side) for side in (gold, answer))
        choices = [_read_choice(side) for side in (gold, answer)]
        if choices[1] and not choices[0] and self._number(gold) is not None:
            return self._compare(gold, choices[1][1])  # (D) 5 where 5 was asked for
        sides = zip(choices, (gold, answer), strict=True)
        letters = [choice[0] if choice else as_words(side) or side for choice, side in sides]
        if not (named or any(choices)) or not all(re.fullmatch("[A-J]", letter) for letter in letters):
            return None
        if letters[0] != letters[1]:
            return Verdict("wrong", "another choice")
        return self._compare(choices[0][1], choices[1][1]) if choices[0] and choices[1] else Verdict("ok")

    def _without_names(self, gold: str, answer: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """``(name, value)`` of both sides, where at least one is ``name = value`` and the other the same or a value;
        names are ``""`` where the sides are to be compared as they stand."""
        of_gold, of_answer = split_name(gold), split_name(answer)
        if of_gold[0] and of_answer[0]:
            # other letters, and y for f(x), are for the worker
            functions = [re.fullmatch(r"([A-Za-z])\(([a-z])\)", name) for name, _ in (of_gold, of_answer)]
            if (ours := functions[0]) and (theirs := functions[1]) and ours[1] == theirs[1]:
                value = of_answer[1]  # f(t)=2t for f(x)=2x
                if ours[2] != theirs[2] and notation.renamed(value, ours[2], "") == value:
                    return of_gold, (of_gold[0], notation.renamed(value, theirs[2], ours[2]))
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
        (gold_kind, golds), (kind, answers) = notation.read_list(gold), notation.read_list(answer)
        kinds, single_gold, single = {gold_kind, kind}, len(golds) == 1, len(answers) == 1
        if kinds == {"()", "{}"} and not (single_gold or single):
            return Verdict("wrong", "a tuple or interval is no set of its numbers")
        may_be_interval = kinds in ({"[]"}, {"(]"}, {"[)"})
        if not (may_be_interval or kinds in ({""}, {"{}"}, {"()"}, {"", "{}"}, {"", "()"})) or "" in (*golds, *answers):
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
            half = _HALF_OF_DAY.fullmatch(answer)
            same = time == notation.clock(half[1].strip() if half else answer)
            return Verdict("ok") if same else Verdict("wrong", "another time")
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
        either = pointed or (number if notation.is_decimal_comma(gold) else None)
        if self._same_number(gold_pointed, either):
            return Verdict("ok")
        if gold_number is not None and number is not None:
            return Verdict("ok" if self._same_number(gold_number, number) else "wrong")
        if gold_number is not None and gold_number.decimal and self._same_number(gold_number, pointed):
            return Verdict("ok")
        gold_words, words = as_words(gold), as_words(answer)
        if gold_words is not None:
            if number is not None and (named := number_in_words(gold_words)):
                return Verdict("ok" if self._same_number(named, number) else "wrong")
            name = re.findall(r"[^\W\d_]+", gold)[-1][0].isupper()
            same = gold_words == answer.strip() if words is None else same_words(gold_words, words, name=name)
            if not same and words is not None and not self.ordered:
                same = sorted(map(str.strip, gold_words.split(","))) == sorted(map(str.strip, words.split(",")))
            return Verdict("ok" if same else "wrong")
        if gold_number is None:
            several = number is not None and self._is_number_list(gold) and notation.read_list(gold)[0] != "{}"
            return Verdict("wrong", "one number where several were asked for") if several else None
        if words is not None:
            right = self._same_number(gold_number, number_in_words(words))
            return Verdict("ok") if right else Verdict("wrong", "words where a number was asked for")
        if self._is_number_list(answer):
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
        r"""``side`` with percent signs and ``\pm`` written out, which math-verify reads in several ways."""
        replacement = r"\\frac{\1}{100}" if self.percent == "hundredth" else r"\1"
        side = re.sub(r"(?<!\d)(\d++(?:\.\d++)?)\s*\\%", replacement, side)
        if units.ANGLE_OF.search(side):
            side = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", side)
        if side.count(r"\pm") == 1:
            side = ",".join(side.replace(r"\pm", sign) for sign in "+-")
        return side


def _read_choice(side: str) -> tuple[str, str] | None:
    r"""``(letter, text)`` of a choice with a number or formula behind it, such as ``(C) 7`` and ``\text{C. } x+1``."""
    match = _CHOICE.fullmatch(side)
    if match is None or re.search(r"[A-J][).]", match[3]) or not re.search(r"\d|[^\W\d_]{2}", match[3]):
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
