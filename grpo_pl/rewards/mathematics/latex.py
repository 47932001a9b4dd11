"""Rewrites LaTeX whose reading needs matched braces: fonts and colours around mathematics, ``\\over``, and the like."""

from __future__ import annotations

import re
from collections.abc import Callable

from grpo_pl.rewards.mathematics.measures import read_measure

_FONTS = (
    "boldsymbol|bm|pmb|mathbf|mathsf|mathtt|mathit|mathnormal|mathrm|textbf|textit|textsf|texttt|textrm|textnormal|text"
    "|emph|underline|ensuremath"
)
_FONT = re.compile(rf"\\({_FONTS})\s*(?=\{{)")
_WITHOUT_WORDS = ("boldsymbol", "bm", "pmb", "ensuremath")
"""Commands whose content is always mathematics."""
_COLOUR = re.compile(r"\\(?:textcolor|color|colorbox)\s*(?:\[[^\]]*\]\s*)?\{[^{}]*\}")
_SWITCHED_WORDS = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt|em)\s+([A-Za-z]{2}[A-Za-z .]*)\}")
_SWITCH = re.compile(
    r"\\(?:bf|bfseries|it|itshape|sf|tt|em|boldmath|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])\s*"
)
_INFIX = re.compile(r"\\(over|choose)(?![a-zA-Z])\s*")
_DOUBLED = re.compile(
    r"\\\\(?=(?:[dtc]?frac|sqrt|leq?|geq?|neq?|lt|gt|pi|infty|times|cdot|pm|in|cup|cap|setminus|text|mathrm|mathbb|left|right"
    r"|alpha|beta|gamma|theta|lambda|sin|cos|tan|log|ln|approx|degree|circ|q?quad|emptyset|boxed|[{}%$])(?![a-zA-Z]))"
)
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-zπ])|(?=\{))")


def group_end(text: str, start: int) -> int:
    """The place behind the brace that closes the one at ``start``; -1 if none does."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return -1


def without_double_brackets(text: str) -> str:
    """``text`` with one pair of braces or parentheses where several enclose the same: ``((x))`` is ``(x)``. Each
    further pair multiplies the work of a parser that does not know what a bracket begins."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for i, char in enumerate(text):
        if char in "({" and text[i - 1 : i] != "\\":
            opened.append(i)
        elif char in ")}" and text[i - 1 : i] != "\\":
            if not opened or text[opened[-1]] + char not in ("()", "{}"):
                return text
            pairs[opened.pop()] = i
    inner = {i + 1: j - 1 for i, j in pairs.items() if pairs.get(i + 1) == j - 1 and text[i + 1] == text[i]}
    dropped = {*inner, *inner.values()}
    return "".join(char for i, char in enumerate(text) if i not in dropped) if dropped else text


def plain_latex(text: str) -> str:
    r"""``text`` without fonts and colours around mathematics, with ``\frac`` for ``\over``, ``\sqrt`` for ``√``, and a
    single backslash before a command where a second one can be no line break."""
    if r"\\" in text and r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _ROOT.sub(lambda root: _ROOTS[root[1]] + (f"{{{root[2] or root[3]}}}" if root[2] or root[3] else ""), text)
    if "\\" not in text:
        return text
    text = _SWITCH.sub("", _SWITCHED_WORDS.sub(r"\\text{\1}", _COLOUR.sub("", text)))
    text = _each_group(text, _FONT, lambda name, content: content if _is_mathematics(name, content) else None)
    for _ in range(10):
        if not (infix := _INFIX.search(text)):
            break
        text = _with_prefix(text, infix)
    return text


def _is_mathematics(font: str, content: str) -> bool:
    """Whether the content of a font command is a number or a formula rather than words or a name: ``\\textbf{5}``."""
    if font in _WITHOUT_WORDS:
        return True
    words = re.sub(r"\\[A-Za-z]+", " ", content)
    if font == "text":  # \text{5 cm} and \text{5 or 6} are read as they stand
        return re.fullmatch(r"[\d\s.,+*/=^-]*\d[\d\s.,+*/=^-]*", words) is not None and content == words
    if font == "mathrm" and not re.search(r"^\s*\d|[+=]", content):  # m/s^2
        names = re.findall(r"[^\W\d_]+", words)
        if names and all(read_measure(name) for name in names):
            return False
    return re.search(r"[A-Za-z]{2}|[^\x00-\x7f]", words) is None and re.search(r"[\d+=^/\\-]", content) is not None


def _each_group(text: str, command: re.Pattern[str], rewrite: Callable[[str, str], str | None]) -> str:
    """``text`` with each ``command`` and its group replaced by a group of what ``rewrite`` says, unless ``None``."""
    parts, at = [], 0
    while match := command.search(text, at):
        end = group_end(text, match.end())
        if end < 0:
            break
        new = rewrite(match[1], text[match.end() + 1 : end - 1])
        if new is None:
            parts.append(text[at : match.end() + 1])
            at = match.end() + 1
        else:
            parts.append(text[at : match.start()])
            text, at = "{" + new + "}" + text[end:], 0
    return "".join([*parts, text[at:]])


def _with_prefix(text: str, infix: re.Match[str]) -> str:
    r"""``{a \over b}`` as ``\frac{a}{b}``, ``{n \choose k}`` as ``\binom{n}{k}``, up to the braces around them."""
    depth, left = 0, infix.start()
    while left > 0 and not (depth == 0 and text[left - 1] == "{"):
        depth += (text[left - 1] == "}") - (text[left - 1] == "{")
        left -= 1
    depth, right = 0, infix.end()
    while right < len(text) and not (depth == 0 and text[right] == "}"):
        depth += (text[right] == "{") - (text[right] == "}")
        right += 1
    command = r"\frac" if infix[1] == "over" else r"\binom"
    fraction = f"{command}{{{text[left : infix.start()].strip()}}}{{{text[infix.end() : right].strip()}}}"
    return text[:left] + fraction + text[right:]
