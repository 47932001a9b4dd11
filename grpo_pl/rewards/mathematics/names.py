"""Recognises names of the value of an answer, on the left of an equals sign: ``x``, ``f'(2)``, ``\\overline{AB}``."""

from __future__ import annotations

import re
from functools import lru_cache

from grpo_pl.rewards.mathematics.answer_text import is_word

_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi"
    "|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|hbar|Pr|Re|Im"
)
_POINTS = r"(?:\\text\s*\{[A-Z]{1,4}\}|[A-Z]{1,4}|[A-Z](?:_\w|')?)"
_TEXT = r"\\text\s*\{\s*(?!not\b|no\b|nor\b|never\b)[^\W\d_][^{}\d,=<>]*\}"
_ACCENT = (
    r"\\(?:overline|vec|hat|bar|tilde|dot|ddot|widehat|widetilde|overrightarrow|mathbb|mathcal|mathfrak|mathscr"
    r"|operatorname)\s*(?:\{[A-Za-z ]+\}|(?<![a-z])[A-Za-z](?![a-z]))"
)
_ATOM = (
    rf"(?:{_TEXT}|{_ACCENT}|\\(?:{_GREEK})(?![a-zA-Z])|\\(?:arg|dim|deg|det|rank|ker)\s*[A-Za-z]"
    rf"|m?\s*\\(?:angle|triangle|measuredangle)\s*{_POINTS}|\[[A-Z]{{3,6}}\]|[A-Za-z]+)"
)
_INDEX = r"\s*_\s*(?:\{(?:[\w\s,+-]|\\text\s*\{\w+\}|\\[a-z]++)+\}|\w|\\text\s*\{\w+\})"  # ++: each has one reading
_MARKS = r"(?:'++|\s*\^\s*(?:\{\s*(?:(?:\\prime\s*)+|\(\w+\)|-\s*1|\*|\\ast|\+)\s*\}|\\prime|\*))"
_ARGUMENT = r"\s*(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])"
_PLAIN = rf"(?:{_TEXT}\s*)?{_ATOM}(?:{_INDEX}|{_MARKS})*(?:{_ARGUMENT})?"
_D = r"(?:\\text\s*\{\s*d\s*\}|d|\\partial)\s*"
_POWER = r"(?:\^\s*(?:\{\s*\w\s*\}|\w)\s*)?"
_DERIVATIVE = (
    rf"\\frac\s*\{{\s*{_D}{_POWER}(?:{_PLAIN})?\s*\}}\s*\{{\s*(?:{_D}(?:\\[a-z]++|[A-Za-z])\s*{_POWER})+\}}\s*"
    rf"(?:{_PLAIN}|\[[^\[\]]*\]|\([^()]*\))?|d[a-zA-Z]/d[a-zA-Z]"
)
_COMPOSED = rf"\(\s*[A-Za-z](?:\s*(?:\\circ|[-+]|\\cdot)\s*[A-Za-z])+\s*\)(?:{_MARKS})?{_ARGUMENT}"
_NORM = rf"(?P<bar>\\?\||\\[lr]?[vV]ert\s*)\s*{_PLAIN}\s*(?:\\?\||\\[lr]?[vV]ert)"
_TRIGONOMETRIC = rf"\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\\(?:{_GREEK}|angle\s*[A-Z]{{1,3}})|[A-Za-z])"
_NAMED = re.compile(
    rf"\s*(?P<name>{_DERIVATIVE}|{_COMPOSED}|{_NORM}|{_TRIGONOMETRIC}|{_PLAIN})\s*=(?!=)\s*(?P<value>[^=]+)"
)
_INDEXED = r"(?:_(?:\{[^{}]*\}|\w))?"
_LETTER = re.compile(r"[A-Za-z](?:_\w+)?")
_NO_LETTERS = re.compile(r"\\(?:text\s*\{[^{}]*\}|[A-Za-z]+)")
_LETTERS = re.compile(rf"([A-Za-z]+)({_INDEXED}'*)(\s*\(\w\))?")
_PRIMES = re.compile(r"\^(?:\\prime)+")
_SPACES = re.compile(r"\s+|[{}]")


def is_equation(text: str) -> bool:
    r"""True for ``x = …`` with the same ``x`` on the right, which says nothing of its value; ``x_0`` and ``x(0)`` are
    others."""
    match = _NAMED.fullmatch(text)
    if match is None:
        return False
    name, value = (_SPACES.sub("", side) for side in (match["name"], match["value"]))
    if _LETTER.fullmatch(name) is None:  # \theta, f(x)
        return re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z_'(])", value) is not None
    for letters, marks, argument in _LETTERS.findall(_NO_LETTERS.sub(" ", match["value"])):
        factors = [letters] if is_word(letters) else [*letters[:-1], letters[-1] + _SPACES.sub("", marks)]
        if name in factors and not (argument and name == factors[-1]):
            return True
    return False


@lru_cache(maxsize=8192)
def split_name(text: str) -> tuple[str, str]:
    """``(name, value)`` of canonical ``name = value``; the name is ``""`` if there is none.

    A name is a letter, word, accent or angle, with indices, primes and arguments, or a derivative. ``2x``, ``x+y``,
    ``x^2`` and numbers are no names, nor is the ``x`` of the equation ``x=x+1``.
    """
    match = _NAMED.fullmatch(text) if "=" in text else None
    if match is None or is_equation(text):
        return "", text
    name = _PRIMES.sub(lambda primes: "'" * primes.group().count("\\"), _SPACES.sub("", match["name"]))
    return name, match["value"].strip()
