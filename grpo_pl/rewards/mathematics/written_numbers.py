"""Numbers that are written out, in digits or words: read and compared without SymPy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

ABSOLUTE_TOLERANCE = Fraction(5, 10**7)
"""Decimals are compared to six places, as in math-verify."""
_PLACES = 6
"""Places that an unfinished decimal (``1.414213…``) must show."""
MAX_EXPONENT = 400
MAX_NUMBER_CHARS = 2000
"""Longer texts are not read as a number: ``int`` and ``Fraction`` refuse more than 4,300 digits."""

_INT = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)|[1-9]\d?(?:,\d\d)+,\d{3}(?!\d)|\d+)"
"""Thousands may be set off by commas or spaces, also as in India: ``12,34,567``."""
_DEC = rf"(?:{_INT}(?:\.\d*)?|\.\d+)"
_FRAC = r"(?:\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(\d+))"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"
_NUMBER = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+\s+|\d+(?=\\frac))?{_FRAC}"
    rf"|(?:(?P<mantissa>{_DEC})\s*(?:\\times|\\cdot|\*)\s*)?{_POWER}"
    r"|(?P<before>\d*\.\d*)\\overline\s*\{(?P<period>\d+)\}"
    r"|(?P<begun>\d*\.\d+)\s*\\ldots"
    rf"|(?P<decimal>{_DEC})(?:[eE](?P<exponent>[+-]?\d+))?"
    rf")\s*(?P<percent>\\%)?\s*"
)


@dataclass(frozen=True)
class Number:
    """A number that is written out, such as ``3``, ``0.5`` or ``1/2``; not an expression still to be evaluated."""

    value: Fraction
    decimal: bool
    """Written with a decimal point or a negative power of ten: it may be rounded."""
    quotient: bool
    """Written as a fraction."""


@lru_cache(maxsize=8192)
def read_number(text: str, *, percent_is_hundredth: bool = True) -> Number | None:
    """The number that canonical ``text`` spells out, or ``None`` if it is anything else.

    Reads integers, decimals, thousands separators, ``a/b``, ``\\frac{a}{b}``, mixed numbers, ``1.5e3``,
    ``1.5 \\times 10^{3}``, ``0.\\overline{3}`` and a percent sign after any of them. Texts over
    ``MAX_NUMBER_CHARS`` characters and powers of ten beyond ±``MAX_EXPONENT`` are not read.
    """
    text = " ".join(text.split())  # the regular expression would try every split of a run of white space
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    if match is None:
        return None
    sign, whole, a1, b1, c1, c2, mantissa, p1, p2, before, period, begun, decimal, exponent, percent = match.groups()
    if begun:
        if len(begun.partition(".")[2]) < _PLACES:
            return None
        decimal = begun
    quotient = False
    power = int(p1 or p2 or exponent or 0) if len(p1 or p2 or exponent or "") <= 5 else MAX_EXPONENT + 1
    if abs(power) > MAX_EXPONENT:
        return None
    if a1 or c1:
        numerator, denominator = int(a1 or c1), int(b1 or c2)
        if denominator == 0 or (whole and min(numerator, denominator) < 0):
            return None
        value = Fraction(numerator, denominator) + int(whole or 0)
        quotient = not whole
    elif period:  # 0.1\overline{6} is 0.1 + 6/90
        places = len(before.partition(".")[2])
        value = Fraction(before.rstrip(".") or "0") + Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    else:
        digits = re.sub(r"[, ]", "", decimal or mantissa or "1")
        value = Fraction(digits.rstrip(".") or "0") * Fraction(10) ** power
    if percent and percent_is_hundredth:
        value /= 100
    inexact = "." in (decimal or mantissa or "") or power < 0
    return Number(value=-value if sign == "-" else value, decimal=inexact, quotient=quotient)


def same_number(gold: Number, answer: Number, relative_tolerance: float) -> bool:
    """True if the values are equal, or, if one is a decimal, |a − g| ≤ min(5·10⁻⁷, ``relative_tolerance`` · |g|)."""
    difference = abs(gold.value - answer.value)
    if difference == 0:
        return True
    if not (gold.decimal or answer.decimal):
        return False
    return difference <= min(ABSOLUTE_TOLERANCE, Fraction(relative_tolerance) * abs(gold.value))


_TO_SIXTEEN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_TENS_IN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
SMALL = {word: i for i, word in enumerate(f"{_TO_SIXTEEN} seventeen eighteen nineteen".split())}
"""Words for the numbers below twenty -> the number."""
_TENS = {word: 10 * i for i, word in enumerate(_TENS_IN_WORDS.split(), 2)}
_SPECIAL = {1: "half", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth", 12: "twelfth"}
_PARTS = {"half": 2, "quarter": 4, "hundredth": 100, "thousandth": 1000} | {
    _SPECIAL.get(number, f"{word}th"): number for word, number in SMALL.items() if number > 2
}
"""Words for the parts of a whole -> how many there are in it."""


def _cardinal(parts: Sequence[str]) -> int | None:
    """The number below a hundred that the words of ``twenty one`` are; ``a`` is one."""
    if len(parts) == 2 and parts[0] in _TENS and 0 < SMALL.get(parts[1], 10) < 10:
        return _TENS[parts[0]] + SMALL[parts[1]]
    return {**SMALL, **_TENS, "a": 1}.get(parts[0]) if len(parts) == 1 else None


def number_in_words(words: str) -> Number | None:
    """The number that a text such as ``two``, ``minus twenty-one``, ``two thirds``, ``one and a half``, ``two point
    five`` or ``three dozen`` is, or ``None``."""
    parts = re.findall("[a-z]+|,", words.casefold()) if re.fullmatch(r"[A-Za-z][A-Za-z\s,-]*", words) else []
    negative = parts[:1] in (["minus"], ["negative"])
    parts = ["a" if part == "an" else part for part in parts[negative:]]
    *before, last = parts or [""]
    value: Fraction | int | None = None
    if "point" in before:
        whole = _cardinal(before[: before.index("point")])
        digits = [SMALL.get(part, 10) for part in parts[parts.index("point") + 1 :]]
        if whole is not None and max(digits) < 10:
            value = whole + Fraction(int("".join(map(str, digits))), 10 ** len(digits))
    elif last == "dozen":
        value = 12 * (_cardinal(before or ["a"]) or 0) or None
    elif denominator := _PARTS.get(last, _PARTS.get(last.removesuffix("s").replace("halve", "half"))):
        joint = max((i for i, part in enumerate(before) if part in ("and", ",")), default=-1)
        whole = _cardinal(before[:joint]) if joint > 0 else 0
        count = _cardinal(before[joint + 1 :] or ["a"] * (last == "half"))
        if whole is not None and count and (count > 1) == (last not in _PARTS):  # a twenty-third is no two thirds
            value = whole + Fraction(count, denominator)
    elif parts != ["a"]:
        value = _cardinal(parts)
    if value is None:
        return None
    return Number(Fraction(-value if negative else value), decimal=False, quotient=Fraction(value).denominator > 1)


_TOKENS = re.compile(
    rf"(?P<number>[+-]?\s*(?:\d+\s+|\d+(?=\\frac))?(?:\\frac\s*\{{\s*-?\d+\s*\}}\s*\{{\s*\d+\s*\}}|\d+\s*/\s*\d+)"
    rf"|[+-]?\s*(?:{_DEC}\s*(?:\\times|\\cdot|\*)\s*)?{_POWER}|[+-]?\s*{_DEC}(?:[eE][+-]?\d+)?)"
    r"|(?P<gap>\s+|\\%|\^\s*\{?\s*\\circ\s*\}?)"
    r"|(?P<open>\\begin\s*\{[a-z]+\}(?:\s*\{[lcr|\s]*\})?|\\?[{(\[])|(?P<close>\\end\s*\{[a-z]+\}|\\?[})\]])"
    r"|(?P<listed>[,;&=<>|\1-\3]|\\\\|[+-]?\\infty|\\(?:le|ge|ne|cup|cap|in|emptyset|setminus|land|lor|mid)(?![a-zA-Z])|:)"
    r"|(?P<sign>[+-](?=\s*[A-Za-z\\]))"
    r"|(?P<word>\\mathbb\s*\{[A-Z]\}|\\text\s*\{[^{}]*\}|[A-Za-z]+(?:_\{?\w+\}?)?)"
)


def is_worked_out(text: str) -> bool:
    """True if canonical ``text`` holds only numbers, names and separators, so that nothing is left to be computed."""
    text = " ".join(text.split())  # as in read_number
    kinds = _TOKENS.sub(lambda token: (token.lastgroup or "")[0], text).replace("g", "")
    if not re.fullmatch("[noclsw]*", kinds):
        return False  # a part of the text is none of the tokens
    return not re.search("[nc][onsw]|w[ns]", kinds)  # 2(3), (2)(3), 3-2, 2x, (2)+3, 3-x
