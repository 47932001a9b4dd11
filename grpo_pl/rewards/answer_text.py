"""Answers as text: finding the boxed one, writing it in one canonical form, and reading plain numbers and units."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

ABSOLUTE_TOLERANCE = Fraction(5, 10**7)
"""Decimals are compared to six places, as math-verify does."""
MAX_NESTING = 40
MAX_DIGIT_RUN = 400
MAX_EXPONENT = 400

_BOX = re.compile(r"\\boxed\s*\{")
_CONTROL = frozenset({"Cc", "Cf", "Cs", "Co"})


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{…}`` of ``text`` holds, with braces matched.

    ``None`` if there is no box, or if the last one is not closed: a cut-off box is not an answer, and an earlier one
    is not the final answer.
    """
    start = -1
    for match in _BOX.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth = 1
    for i in range(start, len(text)):
        char = text[i]
        if char in "{}" and (text[i - 1] != "\\" or text[i - 2] == "\\"):
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[start:i]
    return None


def oversize(text: str, max_chars: int) -> str:
    """Why ``text`` is too large to be worth parsing, or an empty string."""
    if len(text) > max_chars:
        return f"{len(text)} characters, at most {max_chars} are judged"
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    if deepest > MAX_NESTING:
        return f"nested {deepest} deep, at most {MAX_NESTING} is judged"
    if re.search(rf"\d{{{MAX_DIGIT_RUN + 1}}}", text):
        return f"a number of more than {MAX_DIGIT_RUN} digits"
    return ""


def has_control_characters(text: str) -> bool:
    """True for NUL, direction marks, zero-width characters and lone surrogates: nothing an honest answer holds."""
    return any(unicodedata.category(c) in _CONTROL and c not in "\n\t\r" for c in text)


_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SYMBOLS = {
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "−": "-", "–": "-",
    "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "⁄": "/", "，": ",", "′": "'",
}  # fmt: skip
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:displaystyle|textstyle|left|right|bigl?|bigr|Bigl?|Bigr|fbox|limits|nolimits)(?![a-zA-Z])", ""),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\(?:q?quad|enspace|thinspace)(?![a-zA-Z])|~", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mathrm|rm|mathit|text|operatorname)\s*(?:\{\s*([ei])\s*\}|\s([ei])(?![a-zA-Z]))", r"\1\2"),
        (r"\\mathrm\s*([ei])(?![a-zA-Z])", r" \1"),
        (r"\\(?:textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|mathsf)(?=\s*\{)", r"\\text"),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\\\$", r"\\text{dollar} "),
        (r"\$|\\\(|\\\)|\\\[|\\\]", " "),
        (r"(?<![\\a-zA-Z])(?:percent|pct)(?![a-zA-Z])|\\text\{\s*percent\s*\}", r"\\%"),
        (r"(?<!\\)%", r"\\%"),
        (r"\s+", " "),  # before the next one, which would try every length of a run of white space
        (r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z]))", ","),
        (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty"),
        (r"\s+", " "),
    ]
]


@lru_cache(maxsize=8192)
def canonical(text: str) -> str:
    """One spelling for answers that differ in typography only: fullwidth digits, spacing commands, ``\\dfrac`` …"""
    # NFKC turns raised digits and vulgar fractions into plain digits: 5² would become 52, so these come first.
    result = _RAISED_RUN.sub(lambda run: "^{" + run.group().translate(_RAISED) + "}", text)
    result = _LOWERED_RUN.sub(lambda run: "_{" + run.group().translate(_LOWERED) + "}", result)
    result = "".join(
        f" {unicodedata.normalize('NFKC', char)}" if unicodedata.decomposition(char).startswith("<fraction>") else char
        for char in result
    )
    result = "".join(_SYMBOLS.get(char, char) for char in result)
    result = "".join(_SYMBOLS.get(char, char) for char in unicodedata.normalize("NFKC", result))
    for pattern, replacement in _REWRITES:
        result = pattern.sub(replacement, result)
    result = re.sub(r"(?<=[\w})])\s*[.,;]+$", "", result.strip())
    return result.strip()


_INT = r"(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)"
_DEC = rf"(?:{_INT}(?:\.\d*)?|\.\d+)"
_FRAC = r"(?:\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+))"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"
_NUMBER = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+\s+|\d+(?=\\frac))?{_FRAC}"
    rf"|(?:(?P<mantissa>{_DEC})\s*(?:\\times|\\cdot|\*)\s*)?{_POWER}"
    rf"|(?P<decimal>{_DEC})(?:[eE](?P<exponent>[+-]?\d+))?"
    rf")\s*(?P<percent>\\%)?\s*"
)


@dataclass(frozen=True)
class Number:
    """A number written out, as against one that still has to be worked out."""

    value: Fraction
    decimal: bool
    """Written with a decimal point or a power of ten: it may be rounded."""
    quotient: bool
    """Written as a fraction."""


@lru_cache(maxsize=8192)
def read_number(text: str, *, percent_is_hundredth: bool = True) -> Number | None:
    """The number that canonical ``text`` spells out, or ``None`` if it is anything else.

    Reads integers, decimals, thousands separators, ``a/b``, ``\\frac{a}{b}``, mixed numbers, ``1.5e3``,
    ``1.5 \\times 10^{3}`` and a percent sign after any of them.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, a1, a2, b1, b2, c1, c2, mantissa, p1, p2, decimal, exponent, percent = match.groups()
    quotient = False
    power = int(p1 or p2 or exponent or 0) if len(p1 or p2 or exponent or "") <= 5 else MAX_EXPONENT + 1
    if abs(power) > MAX_EXPONENT:
        return None
    if a1 or a2 or c1:
        numerator, denominator = int(a1 or a2 or c1), int(b1 or b2 or c2)
        if denominator == 0 or (whole and min(numerator, denominator) < 0):
            return None
        value = Fraction(numerator, denominator) + int(whole or 0)
        quotient = not whole
    else:
        digits = re.sub(r"[, ]", "", decimal or mantissa or "1")
        value = Fraction(digits.rstrip(".") or "0") * Fraction(10) ** power
    if percent and percent_is_hundredth:
        value /= 100
    inexact = "." in (decimal or mantissa or "") or power < 0
    return Number(value=-value if sign == "-" else value, decimal=inexact, quotient=quotient)


def same_number(gold: Number, answer: Number, relative_tolerance: float) -> bool:
    """Equal exactly; or, where a decimal is involved, to six places and to ``relative_tolerance`` of the gold one."""
    difference = abs(gold.value - answer.value)
    if difference == 0:
        return True
    if not (gold.decimal or answer.decimal):
        return False
    return difference <= min(ABSOLUTE_TOLERANCE, Fraction(relative_tolerance) * abs(gold.value))


_UNIT_NAMES = {
    "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams",
    "kg": "kilogram kilograms kgs",
    "mg": "milligram milligrams",
    "lb": "lbs pound pounds",
    "oz": "ounce ounces",
    "s": "sec secs second seconds",
    "min": "mins minute minutes",
    "h": "hr hrs hour hours",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "l": "liter liters litre litres L",
    "ml": "milliliter milliliters millilitre millilitres mL",
    "gal": "gallon gallons",
    "dollar": "dollars usd",
    "cent": "cents",
    "euro": "euros",
    "degree": "degrees deg",
    "radian": "radians rad",
    "mph": "miles/hour mi/h",
    "km/h": "kph kmh kilometers/hour",
    "m/s": "meters/second",
}
_UNITS = {alias: unit for unit, names in _UNIT_NAMES.items() for alias in [unit, *names.split()]}
_AREA = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_WORDS = "|".join(sorted((re.escape(u) for u in _UNITS if len(u) > 1), key=len, reverse=True))
_LETTERS = "|".join(u for u in _UNITS if len(u) == 1)
_RAISE = r"(?:\^\s*\{?\s*(?P<raise>[23])\s*\}?)?"
_UNIT_ENDINGS = [
    re.compile(rf"(?P<core>.+?)\s*\\text\s*\{{(?P<unit>[^{{}}]*)\}}\s*{_RAISE}"),
    re.compile(r"(?P<core>.+?)\s*\^\s*\{?\s*(?P<unit>\\circ)\s*\}?"),
    re.compile(rf"(?P<core>.*[\d}})])\s*(?P<unit>(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{_WORDS}))\s*{_RAISE}"),
    re.compile(rf"(?P<core>.*[\d}})])\s+(?P<unit>{_LETTERS})\s*{_RAISE}"),
]


@lru_cache(maxsize=8192)
def split_unit(text: str) -> tuple[str, str]:
    """Cuts the unit off canonical ``text``: ``(quantity, unit)``; the unit is empty if there is none.

    A measure comes back in one spelling (``meters`` is ``m``); other words after a number come back as they are.
    """
    if text.startswith(r"\text{dollar}"):
        return text.removeprefix(r"\text{dollar}").strip(), "dollar"
    for ending in _UNIT_ENDINGS:
        match = ending.fullmatch(text)
        if match and re.search(r"[\d}]|\\pi", match["core"]):
            raised = match.groupdict().get("raise")
            return match["core"].strip(), _unit_name(match["unit"]) + (f"^{raised}" if raised else "")
    return text, ""


def _unit_name(text: str) -> str:
    if text == r"\circ":
        return "degree"
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", text.strip().rstrip(".")).split()
    power = ""
    if len(words) > 1 and words[0].rstrip(".").lower() in _AREA:
        power = _AREA[words.pop(0).rstrip(".").lower()]
    name = " ".join(words)
    parts = [_UNITS.get(part, _UNITS.get(part.lower(), part)) for part in name.split("/")]
    joined = "/".join(parts)
    return _UNITS.get(joined, joined) + power


def is_measure(unit: str) -> bool:
    """True for units of measure, which must agree; ``5 apples`` and ``5 pieces`` may both be 5."""
    return any(part.split("^")[0] in _UNIT_NAMES for part in unit.split("/")) if unit else False


def as_words(text: str) -> str | None:
    """A text answer in one spelling (``\\text{Monday}``, ``monday.``, ``(B)``), or ``None`` if it is mathematics."""
    inner, wrapped = re.subn(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    words = re.sub(r"\s+", " ", inner).strip(" .,;:")
    letter = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)", words) or (wrapped and re.fullmatch("([A-Za-z])", words))
    if letter:
        return letter[1]
    if not re.fullmatch(r"[^\W\d_][\w' ,.\-]*", words):
        return None
    if not wrapped and (re.search(r"\d", words) or max(map(len, re.split(r"[ '\-]", words))) < 4):
        return None  # abc may be a product of three letters
    return words.casefold() if len(words) > 1 else words


_TOKENS = re.compile(
    rf"(?P<number>[+-]?\s*(?:\d+\s*)?(?:\\frac\s*\{{\s*-?\d+\s*\}}\s*\{{\s*\d+\s*\}}|\\frac\s*\d\s*\d|\d+\s*/\s*\d+)"
    rf"|[+-]?\s*(?:{_DEC}\s*(?:\\times|\\cdot|\*)\s*)?{_POWER}|[+-]?\s*{_DEC}(?:[eE][+-]?\d+)?)"
    r"|(?P<gap>\s+|\\%|\^\s*\{?\s*\\circ\s*\}?)"
    r"|(?P<separator>[,;&()\[\]{}=<>|]|\\[{}]|\\\\|[+-]?\\infty|\\(?:le|ge|ne|lt|gt|cup|cap|in|emptyset|begin|end)(?![a-zA-Z]))"
    r"|(?P<word>\\text\s*\{[^{}]*\}|[A-Za-z]+(?:_\{?\w+\}?)?)"
)


def is_worked_out(text: str) -> bool:
    """True if canonical ``text`` holds numbers, names and separators only: nothing is left to be computed."""
    position, after = 0, ""
    while position < len(text):
        match = _TOKENS.match(text, position)
        if match is None:
            return False
        kind = match.lastgroup or ""
        if kind not in ("gap", "separator"):
            if after in ("number", "word") and "number" in (kind, after):
                return False  # 3-2, 2x
            after = kind
        elif kind == "separator":
            after = ""
        position = match.end()
    return True
