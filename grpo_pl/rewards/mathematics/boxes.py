"""Finds the answer of a text: the content of its last box, with that of neighbouring boxes as one list."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_pl.rewards.completion_text import BOX, last_boxed
from grpo_pl.rewards.mathematics.canonical import group_end
from grpo_pl.rewards.mathematics.units import is_noun

_BARE = re.compile(
    r"\\boxed\s*(?P<content>[+-]?\d++(?:[.,]\d++)*+|[A-Za-z](?![A-Za-z])|\\[A-Za-z]++(?![\s{\[]))"
    r"(?!\s*(?:[_^/+=>!']|\*(?!\*)|<(?![/a-z])|-\s?\d|\\(?:cdot|times|div|frac|sqrt|pi|over|le|ge|ne|pm)(?![A-Za-z]))|[A-Za-z(])"
)
"""A box without braces, around what is surely all of its content: ``\\boxed 5/7`` is none."""
_GAP = r"(?:[\s$]|\\[()\[\],;:!]|\\q?quad(?![a-zA-Z])|~)*+"
_NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w+\}|\w))?"
_LABEL = r"(?<![\w\\])(?:\\text\s*\{\s*)?\(?(?P<label>[a-h])\)[:.]?(?:\s*\})?"
_BETWEEN = re.compile(
    rf"{_GAP}(?:(?P<noun>(?!(?:\\text\s*\{{)?[\s,]*(?:and|or)\b)(?:[a-z]{{2,}}|\\text\s*\{{[^{{}}]{{1,20}}\}})){_GAP})?"
    rf"(?:(?P<comma>[,;]){_GAP})?(?:(?:\\text\s*\{{\s*+(?:,\s*+)?)?(?P<word>and|or)(?:\s*\}})?{_GAP})?"
    rf"(?:{_LABEL}{_GAP})?(?:{_NAME}{_GAP}={_GAP})?"
)
_LABEL_BEFORE = re.compile(rf"{_LABEL}{_GAP}(?:{_NAME}{_GAP}={_GAP})?$")
_PERCENT = re.compile(rf"{_GAP}(?:\\text\s*\{{\s*)?(?:\\?%|per ?cent(?:age)?(?![a-zA-Z])|pct(?![a-zA-Z]))")
_FARTHEST = 60
"""Most characters between two boxes of one answer."""
_MOST = 50
"""Most boxes of one answer."""


@dataclass(frozen=True)
class Boxed:
    """The answer of a text, and what stands around it."""

    answer: str
    beside: str
    """The text before the first and behind the last of its boxes."""
    percent: bool
    """A percent sign follows the last box."""


def boxed_answer(text: str, *, adjacent: bool = False) -> Boxed | None:
    r"""The content of the last ``\boxed{…}`` of ``text``, or of ``\boxed 7``; ``None`` if there is none, or if the last
    one is not closed.

    Boxes with nothing but a comma, "and" or "or" between them are one list: ``\boxed{1} and \boxed{2}`` is ``1, 2``. A
    noun may stand behind a box and a name before it: ``x_1=\boxed{1}, x_2=\boxed{2}`` is ``1, 2``. With
    ``adjacent``, for gold answers, boxes with nothing between them are one list as well.
    """
    text = _BARE.sub(lambda box: f"\\boxed{{{box['content']}}}", text)
    last = last_boxed(text)
    if last is None:
        return None
    boxes = [(box.start(), box.end(), group_end(text, box.end() - 1)) for box in list(BOX.finditer(text))[-_MOST:]]
    closed = [box for box in boxes if box[2] > 0]
    # of boxes in a box the outermost counts
    boxes = [box for box in closed if not any(start < box[1] and box[2] < end for _, start, end in closed)]
    first, _, end = boxes[-1]
    parts, words, labels = [last], list[str](), list[str]()
    for begin, start, stop in reversed(boxes[:-1]):
        match = _joins(text[stop:first], adjacent)
        part = text[start : stop - 1]
        if match is None or not (parts[0].strip() and part.strip()):
            break
        if words and bool(match["label"]) != bool(labels):
            break
        if match["label"]:
            labels.insert(0, match["label"])
        parts.insert(0, part)
        words.insert(0, match["word"] or "")
        first = begin
    if labels and (before := _LABEL_BEFORE.search(text, max(first - _FARTHEST, 0), first)):
        named = zip([before["label"], *labels], parts, strict=True)  # (a) \boxed{3} (b) \boxed{5}
        answer = " ".join(f"({label}) {part}" for label, part in named)
        return Boxed(answer, (text[:first] + text[end:]).strip(), percent=False)
    if labels:
        parts, words, first = [last], [], boxes[-1][0]
    links = [rf" \text{{ {word} }} " if word else ", " for word in words]
    answer = "".join(f"{part}{link}" for part, link in zip(parts, [*links, ""], strict=True))
    return Boxed(answer, (text[:first] + text[end:]).strip(), percent=_PERCENT.match(text, end) is not None)


def _joins(between: str, adjacent: bool) -> re.Match[str] | None:
    """The match of the text between two boxes if it makes one answer of them."""
    match = _BETWEEN.fullmatch(between) if len(between) <= _FARTHEST else None
    joined = match is not None and (match["comma"] or match["word"] or match["label"])
    if match is None or not (joined or (adjacent and not between.strip())):
        return None
    noun = (match["noun"] or "").removeprefix(r"\text").strip("{} \t.,")
    return match if not noun or is_noun(noun) else None
