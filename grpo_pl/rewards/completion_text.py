"""Finds the parts of a completion: its thoughts, its ``<answer>`` block, its ``\\boxed{…}`` and its program."""

from __future__ import annotations

import re
import unicodedata
from itertools import accumulate

BOX = re.compile(r"\\boxed\s*\{")
_STARTS_WITH_BOX = re.compile(rf"\s*{BOX.pattern}")
BRACES = re.compile(r"\\[\\{}]|[{}]")
"""Braces, and what a backslash escapes of them."""
_UNSEEN = re.compile(
    r"\\(?:[hv]?phantom|[hv]space\*?|m?kern|[hm]skip|color|label)\s*\{[^{}]*\}"  # with what they hold
    r"|\\(?:text(?:bf|it|rm|sf|sl|tt|up|normal)?|math(?:rm|bf|it|sf|tt|bb|cal|frak|scr|normal|ord|op|bin|rel|strut)"
    r"|[mhf]?box|boxed|makebox|boldsymbol|bm|emph|ensuremath|operatorname\*?|smash|(?:under|over)line|bar|hat|vec|tilde"
    r"|sqrt|[dtc]?frac|bf|rm|it|sf|tt|(?:display|text|scriptscript|script)style|normalsize|q?quad|en(?:space|skip)"
    r"|(?:neg)?(?:thin|med|thick)space|nobreakspace|space|[hv]fill?|null|relax|empty|strut|noindent|allowbreak"
    r"|newline|linebreak|par|centering|nonumber|notag|left\.|right\.)(?![A-Za-z])"
    r"|\\[,;:!> /\\()\[\]\n]|\\$|[~$&{}_^\s]"
)
"""LaTeX that shows nothing by itself: spaces, groups, and commands that change how something else looks."""
_BLANKS = frozenset("\u115f\u1160\u3164\uffa0\u2800\ufffc")
"""Letters and symbols that show nothing: Hangul fillers, the Braille pattern without dots, a replaced object."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}`` of ``text``, with braces matched; of nested boxes, the outermost counts.

    ``None`` if there is no box, or if the last one is not closed: a cut-off box is no answer, and an earlier box is not
    the final answer. If a box holds another box and nothing else, the content of the inner one is returned.
    """
    boxes = [match.end() for match in BOX.finditer(text)]
    if not boxes:
        return None
    opened: list[int] = []
    ends: dict[int, int] = {}  # of what stands between two braces: start -> end
    for brace in BRACES.finditer(text, boxes[0] - 1):
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            ends[opened.pop()] = brace.start()
    start = next((start for start in boxes if ends.get(start, -1) >= boxes[-1]), None)
    if start is None:
        return None
    end = ends[start]
    while (inner := _STARTS_WITH_BOX.match(text, start, end)) and not text[ends[inner.end()] + 1 : end].strip():
        start, end = inner.end(), ends[inner.end()]
    return text[start:end]


def has_balanced_braces(text: str) -> bool:
    """True if a pair of braces put around ``text`` would match each other: its own braces balance, and no backslash at
    its end would escape the closing one."""
    braces = BRACES.findall(text)
    depths = [0, *accumulate((brace == "{") - (brace == "}") for brace in braces)]
    return min(depths) == depths[-1] == 0 and not re.search(r"(?<!\\)(?:\\\\)*\\$", text)


def answer_block(completion: str) -> str | None:
    """The content of the last ``<answer>``, up to ``</answer>`` or else the end of the text; ``None`` without one."""
    start = completion.rfind("<answer>")
    return None if start < 0 else completion[start + len("<answer>") :].split("</answer>", 1)[0]


def boxed_or_block(completion: str) -> str:
    r"""The answer of a completion, read after its thoughts: the content of the last ``\boxed{…}``, else of the last
    ``<answer>``; ``""`` if there is neither, if that box is not closed, or if nothing can be seen in it."""
    said = after_thinking(completion)
    found = last_boxed(said) if BOX.search(said) else answer_block(said)
    return "" if found is None or is_blank(found) else found.strip()


def is_blank(text: str) -> bool:
    """True if nothing of ``text`` can be seen: LaTeX and Unicode have many ways to write nothing."""
    return not any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANKS for c in _UNSEEN.sub("", text))


def stated_answer(completion: str) -> str:
    r"""The answer of a completion: its last ``\boxed{…}``, else its last ``<answer>``, after its thoughts if one is
    there; else all of its text."""
    return (boxed_or_block(completion) or last_boxed(completion) or answer_block(completion) or completion).strip()


def after_thinking(completion: str) -> str:
    """The text after the last ``</think>`` (the whole text if there is none), up to the next ``<think>``."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def after_closed_thinking(completion: str) -> str:
    """As `after_thinking`, but all of a text without ``</think>``: behind a prefilled ``<think>``, a policy that was
    never taught to close its thoughts still boxes its answers, and could else never be right."""
    return after_thinking(completion) if "</think>" in completion else completion


_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_PYTHON = frozenset({"", "python", "python3", "py"})


def last_program(completion: str) -> str | None:
    """The last closed block of Python between two lines of ```` ``` ````, behind the last ``</think>``; None without
    one. Blocks that say another language do not count."""
    text = completion.rpartition("</think>")[2]
    found: str | None = None
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence[1]:  # a fence that names a language opens a block, also where the one before was left open
            if opening[1].lower() in _PYTHON:
                found = text[opening.end() + 1 : fence.start()]
            opening = None
        else:
            opening = fence
    return found
