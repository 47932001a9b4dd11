"""Answers as text: finds the boxed one, writes it in one canonical form, and reads plain numbers and words."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from grpo_pl.rewards.mathematics.latex import group_end, plain_latex, without_double_brackets

ABSOLUTE_TOLERANCE = Fraction(5, 10**7)
"""Decimals are compared to six places, as in math-verify."""
MAX_NESTING = 12
MAX_DIGIT_RUN = 400
MAX_EXPONENT = 400
MAX_NUMBER_CHARS = 2000
"""Longer texts are not read as a number: ``int`` and ``Fraction`` refuse more than 4,300 digits."""

_CONTROL = frozenset({"Cc", "Cf", "Cs", "Co"})


def has_compatibility_markup(text: str) -> bool:
    """True if a character becomes a brace, backslash or dollar sign under NFKC: the text that was matched as the
    content of a box could then end at another brace."""
    return any(not char.isascii() and set(unicodedata.normalize("NFKC", char)) & set("{}\\$") for char in text)


def oversize(text: str, max_chars: int) -> str:
    """Why ``text`` is too large to be parsed (characters, nesting, digits of a number), or ``""``."""
    if len(text) > max_chars:
        return f"{len(text)} characters, at most {max_chars} are judged"
    deepest = max(accumulate((char in "([{") - (char in ")]}") for char in text), default=0)
    deepest = max([deepest, *(run.count("|") for run in re.findall(r"\|[|\s]*", text))])
    if deepest > MAX_NESTING:
        return f"nested {deepest} deep, at most {MAX_NESTING} is judged"
    if re.search(rf"\d{{{MAX_DIGIT_RUN + 1}}}", text):
        return f"a number of more than {MAX_DIGIT_RUN} digits"
    return ""


def has_control_characters(text: str) -> bool:
    """True for NUL, direction marks, zero-width characters and lone surrogates, which ordinary answers do not hold."""
    return any(unicodedata.category(c) in _CONTROL and c not in "\n\t\r\f" for c in text)


CURRENCIES = {
    "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee", "₽": "rouble", "₩": "won", "₪": "shekel", "฿": "baht",
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED_UNIT = re.compile("(?<=\\d)[ \u00a0]?([ckdm]?m|ft|in|yd|mi)([²³])(?=[\\s.$]*$)")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_CAPITALS = ("gamma", "delta", "theta", "lambd", "xi", "pi", "sigma", "phi", "psi")
_SYMBOLS = {
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "−": "-", "–": "-",
    "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "⁄": "/", "，": ",", "′": "'", "’": "'", "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ",
    "≧": r"\ge ", "∖": r"\setminus ", "∧": r"\land ", "∨": r"\lor ", "∠": r"\angle ", "△": r"\triangle ", "→": r"\to ",
    "≡": r"\equiv ", "∣": "|", "∗": "*", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
}  # fmt: skip
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda  nu xi  pi rho  sigma tau  phi chi psi omega"
_SYMBOLS |= {chr(ord("α") + i): f"\\{name} " for i, name in enumerate(_GREEK.split(" ")) if name}
_SYMBOLS |= {
    chr(ord("α") + i - 32): f"\\{name.title()} " for i, name in enumerate(_GREEK.split(" ")) if name[:5] in _CAPITALS
}
_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:displaystyle|textstyle|left|right|middle|[bB]igg?[lrm]?|fbox|limits|nolimits)(?![a-zA-Z])", ""),
        (r"\\(?:[lr]?vert|mid)(?![a-zA-Z])", "|"),
        (r"\\abs\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"|\1|"),
        (r"\\[lr]?Vert(?![a-zA-Z])|‖", r"\\|"),
        (r"\\norm\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\\|\1\\|"),
        (r"^(?:[^|]*(?<!\\)\|\|[^|]+(?<!\\)\|\|)+[^|]*$", lambda bars: bars[0].replace("||", r"\|")),  # not |a||b||c|
        (r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\(?:q?quad|enspace|thinspace)(?![a-zA-Z])|~", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?<!\\)\](\s*[^\[\](),;\s][^\[\](),;]*)[,;]([^\[\](),;]+)\[", r"(\1,\2)"),  # ]0, 1[
        (r"(?<!\\)\[([^\[\](),;]+)[,;]([^\[\](),;]+)\[(?![^\[\]]*\])", r"[\1,\2)"),
        (r"(?<![\w)}\]\\])\]([^\[\](),;]+)[,;]([^\[\](),;]+)\]", r"(\1,\2]"),
        (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
        (r"(?:\{\})?[_^]\s*(?:\{(\d+)\}|(\d))\s*C\s*_\s*(?:\{(\d+)\}|(\d))", r"\\binom{\1\2}{\3\4}"),
        (r"\^\s*(\\frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d))", r"^{\1}"),
        (r"(?:\\langle(?![a-zA-Z])|⟨)([^{}<>|⟨⟩]*,[^{}<>|⟨⟩]*)(?:\\rangle(?![a-zA-Z])|⟩)", r"(\1)"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ"),
        (r"\\(vec|hat|bar|tilde|overline)\s+([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
        (r"\\(?:mathrm|rm|mathit|text|operatorname)\s*(?:\{\s*([ei])\s*\}|\s([ei])(?![a-zA-Z]))", r"\1\2"),
        (r"\\mathrm\s*([ei])(?![a-zA-Z])", r" \1"),
        (r"\\(?:textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|mathsf|ce)(?=\s*\{)", r"\\text"),
        (r"\\([lg]e)q(?:slant|q)?(?![a-zA-Z])", r"\\\1"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:R|Reals|reals)(?![a-zA-Z])|\\mathbb\s*R(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus "),
        (r"(\\mathbb\s*\{[A-Z]\})\s*[-\\]\s*(?=\\\{)", r"\1\\setminus "),
        (r"(\d\.\d*)\\(?:bar|dot)\s*\{?(\d)\}?", r"\1\\overline{\2}"),
        (r"(\d\.\d*)\\bar\s*(\{\d+\})", r"\1\\overline\2"),
        (r"^([+-]?\d+\.\d*)\((\d+)\)$", r"\1\\overline{\2}"),
        (r"\s+", " "),  # before the next ones, which would try every length of a run of white space
        (r"\\(?:neq|not\s*=)(?![a-zA-Z])|(?<![\d)!])!=|(?<=\s)!=", r"\\ne "),
        (r"\\(?:thickapprox|approxeq|simeq|doteq)(?![a-zA-Z])", r"\\approx"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\\text\{\s*[€]\s*\}", "€"),
        (r"\\(?:euro|texteuro)(?![a-zA-Z])(?:\{\})?", "€"),
        (r"\\(?:pounds|textsterling)(?![a-zA-Z])(?:\{\})?", "£"),
        (r"\\\$", r"\\text{dollar} "),
        (r"(?<=\d)\s*\$(?=\s*$)", r"\\text{ dollar}"),
        (r"^\s*\$(?=\s*[\d.,]+\s*$)", r"\\text{dollar} "),
        (r"([€£¥₹₽₩₪฿])", lambda sign: rf"\text{{ {CURRENCIES[sign[0]]}}} "),
        (r"\$|\\\(|\\\)|\\\[|\\\]", " "),
        (r"^\s*\\text\{\s*([-+]?[\d.,/]+)\s+([^{}]*)\}\s*$", r"\1\\text{ \2}"),
        (
            r"(?<![\\a-zA-Z])(?:percent(?:age)?|per cent|pct)(?![a-zA-Z])"
            r"|\\text\{\s*(?:percent(?:age)?|per cent|pct)\.?\s*\}",
            r"\\%",
        ),
        (r"(?<!\\)%", r"\\%"),
        (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty"),
        (r"\\text\s*\{\s*(-?\s*\\infty)\s*\}", r"\1"),
        (r"\s+", " "),
    ]
]


_IN_WORDS = re.compile(
    r"(?<=\S),?\s*(?:\\text\{\s*,?\s*(and|or)\s*\}|(?<![\\a-zA-Z{])(and|or)(?![a-zA-Z}]))(?=\s*[^\s}.,;:!?])"
)
_LOGICAL = re.compile(r"\s*\\(land|wedge|lor|vee)(?![a-zA-Z])\s*")
_MINUS_PLUS = re.compile(r"\\mp(?![a-zA-Z])")
_CONDITION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")


def _connective(match: re.Match[str]) -> str:
    return r" \land " if match[match.lastindex or 0] in ("and", "land", "wedge") else r" \lor "


@lru_cache(maxsize=8192)
def canonical(text: str) -> str:
    """One spelling for answers that differ only in typography: fullwidth digits, spacing commands, ``\\dfrac`` …"""
    # NFKC turns raised digits and vulgar fractions into plain digits (5² into 52), so these are rewritten first.
    # With a raised digit 5m² is five square metres; 5m^2 may be a product.
    result = _RAISED_UNIT.sub(lambda unit: rf"\text{{ {unit[1]}}}^{unit[2].translate(_RAISED)}", text)
    result = _RAISED_RUN.sub(lambda run: "^{" + run.group().translate(_RAISED) + "}", result)
    result = _LOWERED_RUN.sub(lambda run: "_{" + run.group().translate(_LOWERED) + "}", result)
    result = "".join(
        f" {unicodedata.normalize('NFKC', char)}" if unicodedata.decomposition(char).startswith("<fraction>") else char
        for char in result
    )
    result = "".join(_SYMBOLS.get(char, char) for char in result)
    pieces = (result[i : i + _PIECE] for i in range(0, len(result), _PIECE))  # NFKC orders marks in quadratic time
    result = "".join(_SYMBOLS.get(char, char) for piece in pieces for char in unicodedata.normalize("NFKC", piece))
    result = plain_latex(result)
    for pattern, replacement in _REWRITES:
        result = pattern.sub(replacement, result)
    if r"\pm" not in result:
        result = _MINUS_PLUS.sub(r"\\pm", result)  # alone it says the same
    in_words = _connective if _CONDITION.search(result) else ","  # 1 or 2 is a list
    result = _LOGICAL.sub(_connective, _IN_WORDS.sub(in_words, result))
    result = re.sub(r"(?<=[\w})])\s*[.,;]+$", "", result.strip()).strip()
    result = without_double_brackets(result)
    if result.startswith("{") and group_end(result, 0) == len(result):
        result = result[1:-1].strip()
    return result


_PIECE = 1000
_INT = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+(?!\d)|\d+)"
_DEC = rf"(?:{_INT}(?:\.\d*)?|\.\d+)"
_FRAC = r"(?:\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+))"
_POWER = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"
_NUMBER = re.compile(
    rf"\s*(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+\s+|\d+(?=\\frac))?{_FRAC}"
    rf"|(?:(?P<mantissa>{_DEC})\s*(?:\\times|\\cdot|\*)\s*)?{_POWER}"
    r"|(?P<before>\d*\.\d*)\\overline\s*\{(?P<period>\d+)\}"
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
    sign, whole, a1, a2, b1, b2, c1, c2, mantissa, p1, p2, before, period, decimal, exponent, percent = match.groups()
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
    """Whether the values are equal, or, if one is a decimal, |a − g| ≤ min(5·10⁻⁷, ``relative_tolerance`` · |g|)."""
    difference = abs(gold.value - answer.value)
    if difference == 0:
        return True
    if not (gold.decimal or answer.decimal):
        return False
    return difference <= min(ABSOLUTE_TOLERANCE, Fraction(relative_tolerance) * abs(gold.value))


_FUNCTIONS = frozenset(
    re.findall(r"\S+", "sin cos tan cot sec csc ln log lg exp sqrt max min gcd lcm det pi arcsin arccos arctan")
)
_VARIABLES = re.compile("[bcdfghkmnpqrstvwxyz]+|[abcd]+|[tuvwxyz]+|[axyz]+|[abxy]+|[mnpqrs]+|[abpqr]+|[abmn]+")
_ROMAN = re.compile("M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})", re.IGNORECASE)
_SMALL_WORDS = frozenset(["bad", "dab", "cab", "dad", "add", "baa"])


def is_word(letters: str) -> bool:
    """True for a bare run of letters that is a word or a name; false for products of variables and for functions.

    A product has at most four letters, all in lower case and from one set of letters that occur together as variables:
    ``xy``, ``abc``, ``mn``. Anything else is a word (``no``, ``odd``), and so are capitals and Roman numerals (``IX``).
    """
    if len(letters) < 2 or letters in _FUNCTIONS:
        return False
    if len(letters) > 4 or not letters.islower() or letters in _SMALL_WORDS:
        return True
    return _VARIABLES.fullmatch(letters) is None or (len(letters) > 2 and _ROMAN.fullmatch(letters) is not None)


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

    Neighbouring ``\\text{…}`` are joined with a space, so that two answers in a row do not equal one of them.
    """
    inner, wrapped = re.subn(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    words = re.sub(r"\s+", " ", inner).strip(" .,;:!")
    letter = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)", words) or (wrapped and re.fullmatch("([A-Za-z])", words))
    if letter:
        return letter[1]
    if not re.fullmatch(r"[^\W\d_][\w' ,.;:!?’()\-]*", words):
        return None
    if not wrapped and (re.search(r"[\d(]", words) or not any(map(is_word, re.findall(r"[^\W\d_]+", words)))):
        return None  # abc may be a product of three letters
    if not wrapped and any(part in _FUNCTIONS for part in words.split()):
        return None
    if not any(is_word(part.casefold()) for part in re.findall(r"[^\W\d_]+", words)):
        return words  # AB is not ab, which is a product
    return _LETTERS.sub(lambda part: part[0] if _HAS_CASE.fullmatch(part[0]) else part[0].casefold(), words)


_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_TENS_IN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {word: i for i, word in enumerate(f"{_UNITS} eighteen nineteen".split())}
_TENS = {word: 10 * i for i, word in enumerate(_TENS_IN_WORDS.split(), 2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}


def number_in_words(words: str) -> Number | None:
    """The number that a text such as ``two``, ``minus twenty-one`` or ``three hundred five`` is, or ``None``."""
    parts = re.findall("[a-z]+", words.casefold()) if re.fullmatch(r"[A-Za-z][A-Za-z\s-]*", words) else []
    negative = parts[:1] in (["minus"], ["negative"])
    total, group, last = 0, -1, 10**12
    for part in parts[negative:]:
        if (scale := _SCALES.get(part)) is not None:
            if group < 1 or (scale == 100 and group > 9) or (scale > 100 and scale >= last):
                return None
            total, group, last = (total, group * 100, last) if scale == 100 else (total + group * scale, -1, scale)
            continue
        value = _SMALL.get(part, _TENS.get(part, -1))
        fits = group < 0 or (group % 100 == 0 and group > 0) or (group % 100 in _TENS.values() and 0 < value < 10)
        if value < 0 or not fits:
            return None
        group = max(group, 0) + value
    if not parts[negative:] or (group < 0 and total == 0):
        return None
    value = total + max(group, 0)
    return Number(Fraction(-value if negative else value), decimal=False, quotient=False)


_TOKENS = re.compile(
    rf"(?P<number>[+-]?\s*(?:\d+\s+|\d+(?=\\frac))?(?:\\frac\s*\{{\s*-?\d+\s*\}}\s*\{{\s*\d+\s*\}}|\\frac\s*\d\s*\d|\d+\s*/\s*\d+)"
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
