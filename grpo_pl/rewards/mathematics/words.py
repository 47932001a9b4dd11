"""Words and names: text answers, and what may stand left of an equals sign: ``x``, ``f'(2)``, ``\\overline{AB}``."""

from __future__ import annotations

import re
from functools import lru_cache

from grpo_pl.rewards.mathematics.nouns import singular
from grpo_pl.rewards.mathematics.written_numbers import number_in_words


def words_of(text: str) -> frozenset[str]:
    """The words of a list that is written as a text."""
    return frozenset(text.split())


_VARIABLES = re.compile("[bcdfghkmnpqrstvwxyz]+|[abcd]+|[tuvwxyz]+|[axyz]+|[abxy]+|[mnpqrs]+|[abpqr]+|[abmn]+")


def is_word(letters: str) -> bool:
    """True for a bare run of letters that is a word or a name; false for products of variables.

    A product has at most four letters, all in lower case and from one set of letters that occur together as variables:
    ``xy``, ``abc``, ``mn``. Anything else is a word (``no``, ``odd``), and so are capitals (``IX``).
    """
    if len(letters) < 2:
        return False
    return len(letters) > 4 or not letters.islower() or _VARIABLES.fullmatch(letters) is None


_ORDINAL_ENDING = re.compile(r"(?<=\d)(?:st|[nr]d|th)(?![A-Za-z])")
_LETTERS = re.compile(r"[^\W_]+(?: ?_\d)?")
_HAS_CASE = re.compile(
    r".*[a-z][A-Z].*|(?:([A-Za-z])(?i:\1))+|(?:[A-Z][a-z]?)+ ?_?\d.*"
    r"|B[hik]|C[fnosu]|H[fos]|In|N[bhip]|Os|P[bou]|S[bcin]|Yb"
)
"""Words in which case counts, where ``YES`` is ``yes``: those that mix cases (``NaCl``, ``pH``), pairs of genes
(``Ee``), formulas with digits (``CO2``), and elements whose capitals alone would be two others (``Co`` and ``CO``); but
``No`` is ``NO``."""


def as_words(text: str) -> str | None:
    """A text answer in one spelling (``\\text{Monday}``, ``monday.``, ``(B)``), or ``None`` if it is mathematics.

    Neighbouring ``\\text{…}`` are one text, as they look, so that two answers in a row do not equal one of them.
    """
    if text.strip() == r"\emptyset":
        return "empty set"
    inner, wrapped = re.subn(r"\\text\s*\{([^{}]*)\}", r" \1 ", re.sub(r"\}\\text\s*\{", "", text))
    words = re.sub(r"\s+", " ", inner).strip(" .,;:!")
    words = _ORDINAL_ENDING.sub("", words)
    letter = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)", words) or (wrapped and re.fullmatch("([A-Za-z])", words))
    if letter:
        return letter[1]
    if not re.fullmatch(r"[^\W\d_][\w' ,.;:!?’()\-]*", words):
        return None
    if not wrapped and (re.search(r"[\d(]", words) or not any(map(is_word, re.findall(r"[^\W\d_]+", words)))):
        return None  # abc may be a product of three letters
    if not any(is_word(part.casefold()) for part in re.findall(r"[^\W\d_]+", words)):
        return words  # AB is not ab, which is a product
    return _LETTERS.sub(lambda part: part[0] if _HAS_CASE.fullmatch(part[0]) else part[0].casefold(), words)


_UNSAID = words_of("an the is are it there on in at has have does do option choice answer")
"""Words that a text answer may hold or leave out."""
_KINDS = words_of("function number triangle circle colour color")
"""Nouns that may stand beside a text answer, as they say what kind of thing it is."""
_SAME = [
    {"no solution", "no real solution", "none", "empty set"},
    {"not exist", "dne", "no limit"},
    {"undefined", "not defined"},
]
"""Answers that say the same."""


_TURNS = words_of("not no nor never none or but than except without unless if neither nothing anything isn't wrong")
"""Words that turn round what a text in front of an equals sign, or behind a choice, says."""


def turns(words: str) -> bool:
    """True if a text holds a word that turns round what stands beside it: ``not``, ``or``, ``anything but``."""
    return not _TURNS.isdisjoint(words.casefold().split())


def same_words(gold: str, answer: str, *, name: bool) -> bool:
    """True for text answers, as `as_words` gives them, that say the same: articles, the copula and one noun beside the
    answer (``the colour is blue``, ``odd function``) may be left out, and words may be in the plural.

    No noun may stand beside a gold answer that is a ``name`` (``Tom brother``) or ends in a noun (``apple tree``) or in
    a word that turns round (``no solution``): that would be another answer.
    """
    ours, theirs = (_said(side) for side in (gold, answer))
    if any({" ".join(ours), " ".join(theirs)} <= same for same in _SAME):
        return True
    more = len(theirs) - len(ours)
    if more < 0 or not ours:
        return False
    rest = theirs[:more] if theirs[more:] == ours else theirs[len(ours) :] if theirs[: len(ours)] == ours else None
    if not rest:
        return rest is not None
    return len(rest) == 1 and rest[0] in _KINDS and not (name or ours[-1] in _KINDS or turns(ours[-1]))


def _said(words: str) -> list[str]:
    parts = re.sub("n't", " not", words).replace("’", "'").split()
    parts = [part for part in parts if part not in _UNSAID] or parts
    parts = parts[1:] if parts[0] == "a" and len(parts) > 1 else parts
    return [singular(part) if part.islower() else part for part in parts]


# --- names of a value ---


_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|upsilon|phi"
    "|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|hbar|Pr|Re|Im"
)
_TEXT = r"\\text\s*\{\s*[^\W\d_][^{}\d,=<>]*\}"
_ACCENT = (
    r"\\(?:overline|vec|hat|bar|tilde|dot|ddot|widehat|widetilde|overrightarrow|mathbb|mathcal|mathfrak|mathscr"
    r"|operatorname)\s*(?:\{[A-Za-z ]+\}|(?<![a-z])[A-Za-z](?![a-z]))"
)
_ATOM = (
    rf"(?:{_TEXT}|{_ACCENT}|\\(?:{_GREEK})(?![a-zA-Z])|\\(?:arg|dim|deg|det|rank|ker|min|max)\s*[A-Za-z]"
    rf"|m?\s*\\(?:angle|triangle|measuredangle)\s*[A-Z]{{1,4}}|\[[A-Z]{{3,6}}\]|[A-Za-z]+)"
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
_NORM = rf"(?P<bar>\\?\||\\[lr]?[vV]ert\s*)\s*{_PLAIN}\s*(?:\\?\||\\[lr]?[vV]ert)"
_NAMED = re.compile(rf"\s*(?P<name>{_DERIVATIVE}|{_NORM}|{_PLAIN})\s*=(?!=)\s*(?P<value>[^=]+)")
_INDEXED = r"(?:_(?:\{[^{}]*\}|\w))?"
_LETTER = re.compile(r"[A-Za-z](?:_\w+)?")
_INDEXED_LETTERS = re.compile(rf"([A-Za-z]+)({_INDEXED}'*)(\s*\(\w\))?")
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
    for letters, marks, argument in _INDEXED_LETTERS.findall(match["value"]):
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
    said = " ".join(re.findall(r"\\text\s*\{([^{}]*)\}", match["name"])).casefold().strip()
    if said and (turns(said) or number_in_words(said)):
        return "", text
    name = _PRIMES.sub(lambda primes: "'" * primes.group().count("\\"), _SPACES.sub("", match["name"]))
    return name, match["value"].strip()
