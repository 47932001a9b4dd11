"""``StrictAnswerReward`` and ``LenientAnswerReward``: a stricter and a more lenient rule to check ``MathReward``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from grpo_pl.rewards.answer_reading import AnswerReward, Found
from grpo_pl.rewards.base import Score, TextAnswerReward
from grpo_pl.rewards.completion_text import BOX, after_thinking, answer_block, has_balanced_braces, last_boxed
from grpo_pl.rewards.format import has_proper_tags, is_one_box
from grpo_pl.rewards.mathematics.canonical import canonical
from grpo_pl.rewards.mathematics.written_numbers import Number, read_number

_NUMBER = re.compile(
    r"(?P<minus>-\s{0,3})?"
    r"(?P<number>\\[dtc]?frac\s*(?:\{\s*-?\d+\s*\}|\d)\s*(?:\{\s*-?\d+\s*\}|\d)|\d[\d,]*(?:\.\d+)?(?:\s{0,3}/\s{0,3}\d+)?)"
)
_NEARLY = Fraction(1, 10**4)
"""Largest relative difference between a number in the text and the gold answer in `LenientAnswerReward`."""
_LISTED = re.compile(r"\d\s{0,3}(?:[,;/]|\b(?:or|and)\b)?\s{0,3}$")
"""Text before the last of several numbers in a row: a guess among others."""
_LONGEST_NUMBER = 400
"""Most characters of a number that is compared by value; longer ones are compared by their symbols."""
_PIECE = 500
"""Characters of the pieces, two at a time, in which a text is brought into one spelling: rules for answers need not be
linear. A longer gold answer is looked for as it is written."""
_PIECES = re.compile(rf"(?s).{{1,{_PIECE}}}(?!\S)|.{{1,{_PIECE}}}")


def boxed_answers(completion: str) -> list[str]:
    r"""The contents of all ``\boxed{…}``, in order and with braces matched; of nested boxes only the innermost.

    Empty if the last box is not closed: a text that was cut off there has given no answer.
    """
    starts = [match.start() for match in BOX.finditer(completion)]
    found = [last_boxed(completion[a:b]) for a, b in pairwise([*starts, len(completion)])]
    return [] if not found or found[-1] is None else [answer.strip() for answer in found if answer is not None]


def normal_form(answer: str) -> Hashable:
    """A value that is equal for all spellings of an answer: (value, whether it is a fraction) of a written-out number,
    the symbols of anything else. ``84/7`` and ``12`` differ, as do ``1/2`` and ``0.5``.
    """
    form = _canonical(answer)
    number = _number(form)
    return (number.value, number.quotient) if number is not None else _without_space(form)


@dataclass(kw_only=True)
class StrictAnswerReward(AnswerReward, TextAnswerReward):
    r"""1 if the text after the last ``</think>`` boxes the gold answer and no other answer, else 0; range {0, 1}.

    Answers are equal if they have the same symbols, typography aside, or are exactly the same written-out number. There
    is no algebra, no tolerance and no unit: ``x+1`` is not ``1+x``, ``0.5`` is not ``1/2``. The rule therefore refuses
    some right answers, but leaves a policy little to exploit:

    - Text after a ``<think>`` that is not closed is no answer, nor is a box before the last ``</think>``.
    - ``<think>`` and ``<answer>`` blocks are opened and closed at most once, one after the other.
    - Several boxes of different content are no answer, nor is a box in a box.
    - An ``<answer>`` block, if there is one, holds one box and nothing else, unless ``allow_text``. Without a block,
      text may stand around the box, but its braces must balance.

    Where ``answer_in`` names another place, what stands there takes the place of the box, and a last number in a row of
    others (``40, 41, 42``) is no answer. The watch sets ``answer_in`` to what the correctness reward reads.
    """

    trusted = True
    name: str = "strict"
    allow_text: bool = False
    """Text may stand beside the box in ``<answer>``."""

    def score(self, completion: str, gold: str) -> Score:
        said = after_thinking(completion)
        in_boxes = self.answer_in == "box" or (self.answer_in == "auto" and BOX.search(said) is not None)
        found = Found("") if in_boxes else self.read(said)
        answers = boxed_answers(said) if in_boxes else [found.text]
        if not answers or not answers[-1]:
            return Score(0.0, "timeout" if found.late else "no_answer", found.note)
        if (longest := max(map(len, answers))) > len(gold) + 1000:
            return Score(0.0, "too_long", f"{longest} characters")
        fault = "" if has_proper_tags(completion) else "tags nested, repeated, missing or out of order"
        fault = fault or (self._fault_of_boxes(answers, said) if in_boxes else self._fault_of_text(found.text, said))
        if fault:
            return Score(0.0, "wrong", fault)
        same = normal_form(answers[-1]) == normal_form(gold)
        return Score.of(float(same), found.note)

    def _fault_of_boxes(self, boxes: Sequence[str], said: str) -> str:
        """The fault in the form of the answer, or ``""``; ``said`` is the text after the thoughts."""
        if len(boxes) < len(BOX.findall(said)):
            return "a box in a box, or one that is not closed"
        block = answer_block(said)
        if block is None and not has_balanced_braces(said):
            return "braces that do not balance"
        if block is not None and not boxed_answers(block):
            return "a box outside the answer block"
        if block is not None and not (self.allow_text or is_one_box(block)):
            return "text beside the box"
        return f"{len(boxes)} boxes that differ" if len(set(map(normal_form, boxes))) > 1 else ""

    def _fault_of_text(self, number: str, said: str) -> str:
        """As `_fault_of_boxes`, for a number or text in another place; the text before it may end in -$."""
        before = said.rpartition(number if number in said else number.lstrip("-+"))[0].rstrip("-+$€£")
        listed = self.answer_in in ("last_number", "auto") and _LISTED.search(before[-20:])
        return "the last of several numbers in a row" if listed else ""


@dataclass(kw_only=True)
class LenientAnswerReward(TextAnswerReward):
    """1 if the gold answer occurs anywhere in the text, boxed or not, else 0; range {0, 1}.

    A number is searched by value, to a relative difference of 10⁻⁴, among all numbers of the text; anything else by its
    symbols, typography and spaces aside, or as it is written if it has over 500 characters. Mentioning the answer is
    enough, so a list of candidates is worth 1: never train on this reward. A completion that it refuses does not
    mention the gold answer.
    """

    trusted = True
    name: str = "lenient"

    def score(self, completion: str, gold: str) -> Score:
        if len(gold) > _PIECE:
            return Score.of(float(_without_space(gold) in _without_space(completion)))
        form = canonical(gold)
        number = _number(form)
        if number is not None:
            near = _NEARLY * abs(number.value)
            found = any(abs(value - number.value) <= near for value in _numbers(completion))
        else:
            form = _without_space(form)
            pieces = _PIECES.findall(completion)
            doubled = [first + second for first, second in pairwise(pieces)] or pieces
            found = any(form in _without_space(canonical.__wrapped__(piece)) for piece in doubled)
        return Score.of(float(found))


def _numbers(completion: str) -> Iterator[Fraction]:
    """Every number of a text; after a minus sign, which may be an operator, the number and its negative."""
    for match in _NUMBER.finditer(completion.replace("−", "-")):
        whole = match["number"]
        parts = [whole] if _value(whole) is not None else whole.split(",", 100)[:100]  # 1,2 is a list
        for part in parts:
            if (value := _value(part)) is not None:
                yield value
                if match["minus"]:
                    yield -value


def _value(piece: str) -> Fraction | None:
    number = read_number(canonical(piece)) if 0 < len(piece) <= 100 else None
    return None if number is None else number.value


def _canonical(answer: str) -> str:
    """``canonical``, piece by piece for an answer that is longer than anybody reads."""
    return canonical(answer) if len(answer) <= 2 * _PIECE else "".join(map(canonical, _PIECES.findall(answer)))


def _number(form: str) -> Number | None:
    return read_number(form) if len(form) <= _LONGEST_NUMBER else None


def _without_space(form: str) -> str:
    return "".join(form.split())
