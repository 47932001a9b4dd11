r"""Finds the answer in a completion: in the last box, as the last number, behind a pattern, or in a field of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import regex

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.rewards.base import Columns, Reward
from grpo_pl.rewards.completion_text import BOX, after_closed_thinking, after_thinking, answer_block, last_boxed

Place = Literal["box", "last_number", "pattern", "json", "auto"]
PATTERN_SECONDS = 1.0
"""A pattern of the user that takes longer on one completion is given up: some take exponential time."""
MOST_OBJECTS = 200
"""Beginnings of JSON objects that are tried; a text with more that lead to nothing has no answer."""

_NUMBER = regex.compile(
    r"""\\[dt]?frac\s*+\{\s*+-?\d++\s*+\}\s*+\{\s*+\d++\s*+\}    # \frac{1}{2}
    |[^\W\d]\w*+(?:[.,:/^]\d\w*+)*+                               # a word, and what hangs on it: x2, v1.5
    |(?P<number>
      (?:(?<![\w)\]}%])[-−+])?[$€£]?                              # a sign, if nothing stands directly before it
      (?:(?<![\w.])\.)?\d++                                       # 7, .7
      (?:(?:[.,:/^]|\*\*)\d++|\^\{[^{}\s]{0,20}\})*+              # 1,000.50, 3/4, 12:30, 2^{10}: one number or none
      [⁰¹²³⁴-⁹⁺⁻]*+(?:[eE][-+]?\d++)?(?:[^\W\d]\w*+|\s?+\\?%)?                 # 1e5, 5kg, 50%
    )""",
    regex.VERBOSE,
)
_ORDINAL = regex.compile(r"\d(?:st|[nr]d|th)$", regex.IGNORECASE)
_NO_MONEY = str.maketrans("", "", "$€£")
_OBJECT = regex.compile(r'\{\s*+"')


@dataclass(frozen=True)
class Found:
    """The answer of a completion, as it was read."""

    text: str
    """The answer; empty if there is none."""
    note: str = ""
    """The place it was taken from, if there was a choice, or the reason why there is none."""
    late: bool = False
    """The pattern took too long."""


@dataclass(kw_only=True)
class AnswerReward(Reward):
    """A reward that judges the answer of a completion, and nothing else of it.

    Only what stands after the last ``</think>`` is read, and nothing of an unclosed ``<think>``; but `MathReward` reads
    the boxes of a text that has no ``</think>`` at all.
    """

    answer_in: Place = "box"
    r"""Place of the answer. ``box``: in the last ``\boxed{…}``. ``last_number``: the last number, with its sign, a
    percent sign and what hangs on it (``1,000.5``, ``3/4``, ``\frac{3}{4}``, ``12:30``, ``5kg`` are one each; ``x2``,
    ``5th`` and ``five`` are none). ``pattern``: see ``answer_pattern``. ``json``: in the field ``answer_field`` of the
    last JSON object that has it. ``auto``: the last box if there is one, else the last number inside ``<answer>``, else
    the last number; the score's detail says which."""
    answer_pattern: str | None = None
    """For ``pattern``: a regular expression, whose last match counts. With a group the answer is that group, without
    one the rest of the line behind the match."""
    answer_field: str = "answer"
    """For ``json``: name of the field; it holds a text or a number."""

    def __post_init__(self) -> None:
        check_choice("answer_in", self.answer_in, Place)
        if (self.answer_pattern is not None) != (self.answer_in == "pattern"):
            raise ValueError(
                f"answer_in is {self.answer_in!r} and answer_pattern is {self.answer_pattern!r}: give answer_pattern "
                "with `answer_in: pattern`, and only there."
            )
        if self.answer_pattern is not None:
            try:
                groups = regex.compile(self.answer_pattern).groups
            except regex.error as error:
                raise ValueError(
                    f"answer_pattern {self.answer_pattern!r} is no regular expression: {error}."
                ) from error
            if groups > 1:
                raise ValueError(
                    f"answer_pattern {self.answer_pattern!r} has {groups} groups: mark the answer by one, "
                    "and write the others as (?:…)."
                )
        if self.answer_field != "answer" and self.answer_in != "json":
            raise ValueError(f"answer_field is {self.answer_field!r}, which needs `answer_in: json`.")

    def read(self, completion: str) -> Found:
        """The answer of a completion."""
        completion = after_closed_thinking(completion)
        if self.answer_in == "box":
            return Found(last_boxed(completion) or "")
        if self.answer_in == "auto":
            return read_anywhere(completion)
        said = after_thinking(completion)
        if self.answer_in == "last_number":
            return Found(last_number(said))
        if self.answer_in == "json":
            return json_field(said, self.answer_field)
        assert self.answer_pattern is not None
        return behind_pattern(said, self.answer_pattern)

    def stated_answers(self, completions: Sequence[str], columns: Columns) -> list[str]:
        return [self.read(text).text for text in completions]


def last_number(text: str) -> str:
    """The last number of ``text`` as it is written, without a sign of money; empty if there is none."""
    found = ""
    for match in _NUMBER.finditer(text):
        if match["number"]:
            found = found if _ORDINAL.search(match[0]) else match[0]
        elif match[0].startswith("\\"):
            found = match[0]
    return found.translate(_NO_MONEY)


def is_plain_number(gold: str) -> bool:
    """True for a gold answer that `last_number` can find: digits with a sign and a decimal point at most."""
    return regex.fullmatch(r"-?\d+(?:\.\d+)?", gold.strip()) is not None


def read_anywhere(completion: str) -> Found:
    """The answer in the most explicit of the places that the completion has."""
    if BOX.search(completion):
        return Found(last_boxed(completion) or "", "from the last box")
    said = after_thinking(completion)
    block = answer_block(said)
    if block is not None:
        return Found(last_number(block), "from <answer>")
    return Found(last_number(said), "from the last number")


def behind_pattern(text: str, pattern: str) -> Found:
    """The group of the last match, or what follows on its line."""
    try:
        last = None
        for last in regex.finditer(pattern, text, timeout=PATTERN_SECONDS):  # noqa: B007 - the last one
            pass
    except TimeoutError:
        return Found("", f"answer_pattern took more than {PATTERN_SECONDS:g} s", late=True)
    if last is None:
        return Found("")
    answer = last[1] if last.re.groups else text[last.end() :].partition("\n")[0]
    return Found((answer or "").strip())


def json_field(text: str, field: str) -> Found:
    """The field of the last JSON object that has it at its top level; numbers as they are written."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON, though Python would read it")

    decoder = json.JSONDecoder(parse_int=_Spelled, parse_float=_Spelled, parse_constant=refuse)
    found, start, tries = Found(""), 0, 0
    while tries < MOST_OBJECTS and (opening := _OBJECT.search(text, start)):
        start = opening.end()
        try:
            value, start = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            tries += 1
            continue
        if field in value:
            answer = value[field]
            if isinstance(answer, str):
                found = Found(str(answer).strip())
            else:
                found = Found("", f"the field {field!r} holds neither a text nor a number")
    return found


class _Spelled(str):
    """A number of a JSON text as it is written: 5.0 is not rewritten, and no number is too long to be read."""
