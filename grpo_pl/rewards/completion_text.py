"""Finds the parts of a completion: its thoughts, its ``<answer>`` block, its ``\\boxed{…}`` and its program."""

from __future__ import annotations

import re
import unicodedata
from itertools import accumulate

BOX = re.compile(r"\\boxed\s*\{")
_STARTS_WITH_BOX = re.compile(rf"\s*{BOX.pattern}")
BRACES = re.compile(r"\\[\\{}]|[{}]")
"""Braces, and what a backslash escapes of them."""
_LENGTH = r"[-+]?\s*+[\d.,]*+\s*+(?:pt|mu|em|ex|cm|mm|in|pc|bp|dd|cc|sp|fil{1,3})(?![A-Za-z])"
_HIDING = re.compile(
    r"\\(?:[hv]?phantom|[hv]space\*?|textcolor|color|label|raisebox)(?![A-Za-z])\s*+(?:\[[^\[\]]*\]\s*+)?"
    r"(?:\{|\\[A-Za-z]+|[^\s\\{}])"
    r"|\\(?:m?kern|[hvm]skip)\s*+\{"
)
"""Commands whose argument is not seen, up to the brace that opens it, or with an argument without braces."""
_UNSEEN = re.compile(
    rf"\\(?:m?kern|[hvm]skip)\s*+{_LENGTH}(?:\s*(?:plus|minus)\s*+{_LENGTH})*"
    r"|\\(?:begin|end)\s*\{[^{}]*\}(?:\s*\{[lcr|\s]*\})?"
    r"|\\(?:text(?:bf|it|rm|sf|sl|sc|tt|up|md|normal)?|math(?:rm|bf|it|sf|tt|bb|cal|frak|scr|normal|ord|op|bin|rel|inner|strut)"
    r"|[mhvf]?box|boxed|[lrc]lap|makebox|framebox|boldsymbol|bm|pmb|emph|ensuremath|operatorname\*?|smash|(?:under|over)line|bar"
    r"|(?:wide)?(?:hat|tilde)|vec|dot|sqrt|[dtc]?frac|(?:display|text|scriptscript|script)style|rm|bf|it|sf|tt|sc|sl|em"
    r"|(?:bf|md)series|(?:it|sl|sc|up)shape|(?:rm|sf|tt)family|normalfont|tiny|scriptsize|footnotesize|small|normalsize"
    r"|[lL]arge|LARGE|[hH]uge|boldmath|q?quad|en(?:space|skip)|(?:neg)?(?:thin|med|thick)space|(?:small|med|big)skip"
    r"|nobreakspace|space|[hv]fill?|hss|null|relax|empty|strut|noindent|indent|allowbreak|newline|linebreak|par|centering|nonumber"
    r"|notag|left\.|right\.|limits|nolimits|[bB]igg?[lrm]?\.)(?![A-Za-z])"
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
    ends = _groups(text, boxes[0] - 1)
    start = next((start for start in boxes if ends.get(start, -1) >= boxes[-1]), None)
    if start is None:
        return None
    end = ends[start]
    while (inner := _STARTS_WITH_BOX.match(text, start, end)) and not text[ends[inner.end()] + 1 : end].strip():
        start, end = inner.end(), ends[inner.end()]
    return text[start:end]


def _groups(text: str, at: int = 0) -> dict[int, int]:
    """What stands between two braces that match, from ``at`` on: where it starts -> where it ends."""
    opened: list[int] = []
    ends: dict[int, int] = {}
    for brace in BRACES.finditer(text, at):
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            ends[opened.pop()] = brace.start()
    return ends


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
    shown, at, ends = list[str](), 0, _groups(text)
    while hiding := _HIDING.search(text, at):
        shown.append(text[at : hiding.start()])
        at = ends.get(hiding.end(), len(text)) if hiding[0].endswith("{") else hiding.end()
    shown.append(text[at:])
    seen = _UNSEEN.sub("", "".join(shown))
    return not any(unicodedata.category(c)[0] in "LNPS" and c not in _BLANKS for c in seen)


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


_FENCE = re.compile(r"^[ \t]*+(?:</?\w++>[ \t]*+)*+```[ \t]*+([^\s`<]*+)[^\n`]*+$", re.MULTILINE)
_PYTHON = frozenset({"python", "python3", "py"})


def last_program(completion: str) -> str | None:
    """The last closed block of Python between two lines of ```` ``` ````, behind the last ``</think>``; None without
    one. Blocks that say another language do not count, nor do those that say none, such as what the program prints, if
    another says Python. Tags such as ``<answer>`` may stand on the lines of the fences."""
    text = completion.rpartition("</think>")[2]
    found: str | None = None
    named = False
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif not fence[1]:  # a fence that names a language opens a block, also where the one before was left open
            says_python = opening[1].lower() in _PYTHON
            if says_python or not (opening[1] or named):
                found, named = text[opening.end() + 1 : fence.start()], says_python
            opening = None
        else:
            opening = fence
    return found
