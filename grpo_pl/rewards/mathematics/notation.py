"""Reads what the notation of an answer says: times, dates, bases, assignments, approximations, remarks, open work."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from grpo_pl.rewards.mathematics.canonical import depths
from grpo_pl.rewards.mathematics.written_numbers import SMALL, read_number

_SPACES = re.compile(r"(?<![A-Za-z\d])\s+|\s+(?![A-Za-z\d])")
_CLOCK = re.compile(r"0?(\d{1,2}):([0-5]\d)(?::([0-5]\d))?")
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}")
_BASE_NUMBER = rf"(?P<base>\d{{1,2}}|{'|'.join([*SMALL][2:17])})"
_BASED = re.compile(
    r"\(?(?P<digits>-?\s?(?:\d+ )*[A-Fa-f]*\d[0-9A-Fa-f]*(?:\.[0-9A-Fa-f]+)?|-?[A-F]+)\)?\s*"
    rf"(?:_\s*(?:\{{\s*(?:\\text\s*\{{\s*)?{_BASE_NUMBER}\s*\}}?\s*\}}|(?P<short>\d)|\\text\s*\{{\s*(?P<name>[a-z]+)\s*\}})"
    rf"|\s*(?:\\text\s*\{{\s*)?\(?\s*(?:in\s+)?base[\s-]+\}}?\s*(?P<long>\d{{1,2}}|[a-z]+)\s*\)?\s*\}}?)"
)
_ARITHMETIC_OPERATORS = (
    "int|iint|iiint|oint|sum|prod|coprod|lim|limsup|liminf|binom|tbinom|dbinom|bmod|pmod|mod|nabla"
    "|det|gcd|deg|max|min|sup"
)
_UPRIGHT = r"(?:\\(?:text|mathrm)\s*\{?\s*)?"
_OPERATORS = re.compile(
    rf"\\(?:{_ARITHMETIC_OPERATORS}|partial|dv|pdv|derivative)(?![a-zA-Z])"
    r"|\\(?:operatorname|text)\s*\{\s*(?:lcm|gcd|det|lim|tr|rank|max|min|mod|Res)\s*\}"
    r"|(?<![A-Za-z\\])d(?:\^\d)?\s*/\s*d[a-zA-Z](?![A-Za-z])|(?<=[)\]}A-Za-z])\s*(?:'|\^\s*\{?\s*\\prime)|!"
    r"|\|[^|]+\||\\[lr]?[vV]ert(?![a-zA-Z])|[vV]matrix"
)
_DIFFERENTIAL = re.compile(rf"\\frac\s*\{{?\s*{_UPRIGHT}(?:[dD]|\\partial)(?![a-zA-Z]{{3}})")
_BY_DIFFERENTIAL = re.compile(rf"[}}dD]\s*\{{\s*{_UPRIGHT}(?:[dD]|\\partial)\s*\}}?\s*[a-zA-Z\\]")
_SOLVED = re.compile(r"\s*\|\s*[A-Za-z]\s*\|\s*(?:[<>]|\\[lg]e(?![a-zA-Z]))\s*[\d.]+\s*")
_LONE_INFINITY = re.compile(
    r"(?:(?<=[,;(\[=<>|:])|(?<=\\\{)|(?<=^)|(?<=\\to)|(?<=\\le)|(?<=\\ge)|(?<=\\ne)|(?<=\\cup))\s*[+-]?\s*\\infty(?![a-zA-Z])\s*"
    r"(?=$|[,;)\]<>=|]|\\(?:[}]|right|cup|cap|le|ge|ne|lt|gt)(?![a-zA-Z]))"
)
_NAME = r"(?:(?:[A-Za-z]+|\\[a-zA-Z]+)(?:_(?:\{\w+\}|\w))?(?:\([^()=]{1,20}\))?)"
_ASSIGNMENT = re.compile(rf"\s*({_NAME})\s*=\s*([^=]+?)\s*")
_NAMED_TUPLE = re.compile(rf"\s*\(\s*({_NAME}(?:\s*,\s*{_NAME})+)\s*\)\s*=\s*(\(.*\))\s*")
_RELATION = re.compile(r"(<|>|\\(?:le|ge|lt|gt)(?![a-zA-Z]))")
_TURNED = {"<": "<", r"\lt": "<", r"\le": "≤", ">": "<", r"\gt": "<", r"\ge": "≤"}
_BELOW = re.compile(r"(?<=[\d)}\]])_\{?\s*(\d+)")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_DECIMAL_COMMA = re.compile(r"([+-]?(?:\d{1,3}(?:[. ]\d{3})+|\d*)),(\d+)")


@lru_cache(maxsize=8192)
def symbols(text: str) -> str:
    """Canonical ``text`` without spaces that have no meaning: answers with equal results have the same symbols."""
    return _SPACES.sub("", text).rstrip(".")


def clock(text: str) -> tuple[int, str, str | None] | None:
    """(hour, minute, second) of what may be a time of day: ``12:00``, ``07:32``."""
    match = _CLOCK.fullmatch(text)
    return (int(match[1]), match[2], match[3]) if match else None


def is_date(text: str) -> bool:
    """True for dates in digits, such as ``2024-01-31``, which must not be read as subtractions or quotients."""
    return _DATE.fullmatch(text) is not None


def ratio(text: str) -> tuple[Fraction | str, ...] | None:
    """The terms of a ratio of three or more, divided by the first: equal for ``1:2:3`` and ``2:4:6``; ``None`` for
    anything else, such as ``a:b:c = 1:2:3``. math-verify would divide the terms one after another."""
    terms = split_top(symbols(text), ":")
    if len(terms) < 3 or "" in terms or "=" in text:
        return None
    if not all(re.fullmatch(r"\d{1,20}(?:\.\d{1,20})?", term) for term in terms) or not Fraction(terms[0]):
        return tuple(terms)
    return tuple(Fraction(term) / Fraction(terms[0]) for term in terms)


_POINTS = re.compile(
    r"(?:m\s*)?\\(?P<figure>angle|triangle|overline|overrightarrow|overleftrightarrow|vec)\s*\{?\s*(?P<points>[A-Z]{2,3})\s*\}?"
)


def points(text: str) -> tuple[str, str] | None:
    r"""The kind and the points of an angle, triangle, segment, line or ray, in one order for all names; ``None`` for
    anything else. ``\angle ABC`` is ``\angle CBA`` and not ``\angle ACB``; math-verify multiplies the letters."""
    match = _POINTS.fullmatch(text)
    if match is None:
        return None
    figure, named = match["figure"], match["points"]
    if figure == "triangle":
        named = "".join(sorted(named))
    elif figure in ("angle", "overline", "overleftrightarrow"):
        named = min(named, named[::-1])
    return figure, named


_ELEMENT = (
    "(?:A[cglmrstu]|B[aehikr]?|C[adeflmnorsu]?|D[bsy]|E[rsu]|F[elmr]?|G[ade]|H[efgos]?|I[nr]?|Kr?|L[airuv]|M[cdgnot]"
    "|N[abdehiop]?|O[gs]?|P[abdmortu]?|R[abefghnu]|S[bcegimnr]?|T[abcehilms]|U|V|W|Xe|Yb?|Z[nr])"
)
_FORMULA = re.compile(rf"(?:{_ELEMENT}\d*|\(|\)\d*)+(?:\^\d?[+-])?")


@lru_cache(maxsize=8192)
def chemical_formula(text: str) -> str | None:
    r"""``H2O`` of ``\text{H}_2\text{O}``, ``H_2O`` and ``\text{H2O}``; ``None`` if it is no formula of elements."""
    formula = re.sub(r"\\text(?![a-zA-Z])|[{}_\s]", "", text)
    return formula if _FORMULA.fullmatch(formula) else None


_SET_OPERATION = re.compile(r"\\(?:cup|cap)(?![a-zA-Z])")
_IN_PARENTHESES = re.compile(r"\(([^(),]*)\)")


def sets(text: str) -> str | None:
    r"""The symbols of unions or intersections of sets in alphabetical order, also in parentheses: ``A\cup B`` for
    ``B\cup A``; ``None`` for anything else."""
    if not _SET_OPERATION.search(text):
        return None
    text = _IN_PARENTHESES.sub(lambda group: f"({sets(group[1]) or symbols(group[1].strip())})", text)
    open_brackets = depths(text)
    signs = [sign for sign in _SET_OPERATION.finditer(text) if open_brackets[sign.start()] == 0]
    if len({sign[0] for sign in signs}) != 1:  # of A \cup B \cap C nobody knows what comes first
        return symbols(text.strip())
    bounds = [(0, 0), *(sign.span() for sign in signs), (len(text), len(text))]
    return f" {signs[0][0]} ".join(
        sorted(symbols(text[end:start].strip()) for (_, end), (start, _) in pairwise(bounds))
    )


@lru_cache(maxsize=8192)
def chain(text: str) -> tuple[str, ...] | None:
    """The terms and signs of a chain of two or more inequalities, smallest term first: ``c>b>a`` is ``a<b<c``. ``None``
    for anything else."""
    parts = _RELATION.split(text)
    signs = parts[1::2]
    if len(signs) < 2:
        return None
    falling = [sign in (">", r"\gt", r"\ge") for sign in signs]
    if any(falling) != all(falling):
        return None
    links = tuple(_TURNED[part] if i % 2 else symbols(part.strip()) for i, part in enumerate(parts))
    return links[::-1] if falling[0] else links


@lru_cache(maxsize=8192)
def read_base(text: str) -> tuple[str, int] | None:
    """``(digits, base)`` of a number whose base, 2 to 16, is stated by a subscript or in words, or ``None``."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    written = match["base"] or match["short"] or match["name"] or match["long"] or ""
    base = int(written) if written.isdigit() else SMALL.get(written, 0)
    digits = match["digits"].replace(" ", "").upper()
    if not 2 <= base <= 16 or not re.search(r"\d", digits) or any(int(d, 16) >= base for d in digits if d.isalnum()):
        return None
    return digits.lstrip("0") or "0", base


def leaves_work(gold: str, answer: str) -> bool:
    r"""True if ``answer`` has an operator that is still to be carried out (an integral, a limit, ``!`` …) and ``gold``
    has none. ``|x|<3`` is as simple as ``-3<x<3``; ``|x-1|<3`` is still to be solved."""
    if _SOLVED.fullmatch(answer):
        return False
    return _has_work(answer) and not _has_work(gold)


def _has_work(text: str) -> bool:
    derivative = _DIFFERENTIAL.search(text) and _BY_DIFFERENTIAL.search(text)
    return bool(derivative or _OPERATORS.search(text))


def computes_with_infinity(text: str) -> bool:
    r"""True if an ``\infty`` is part of a sum, product or power: ``\infty+1``, ``2\infty``."""
    return r"\infty" in _LONE_INFINITY.sub(" ", text)


def numbers_below(text: str) -> set[str]:
    """The numeric subscripts of numbers and brackets, which may state a base; math-verify ignores them."""
    return set(_BELOW.findall(text))


_VECTOR = r"\\(?:vec|hat|overrightarrow)\s*(?:\{[^{}]*\}|[A-Za-z])|\\text\s*\{\s*[a-z]\s*\}"
_CROSS_PRODUCT = re.compile(rf"(?:{_VECTOR})\s*\\times\s*(?:{_VECTOR})")


def cross_products(text: str) -> list[str]:
    """The pairs of vectors whose cross product ``text`` holds; math-verify multiplies them in any order."""
    return sorted(re.sub(r"[{}\s]", "", pair.group()) for pair in _CROSS_PRODUCT.finditer(text))


def remarks(text: str) -> list[str]:
    r"""The contents of all ``\text{…}`` in lower case, without those of a single letter."""
    found = (re.sub(r"\s+", " ", content).strip(" .,;:()").casefold() for content in _TEXT.findall(text))
    return [content for content in found if len(content) > 1]


def split_top(text: str, separators: str = ",;") -> list[str]:
    """``text`` cut at the commas and semicolons, or other ``separators``, outside all brackets."""
    cuts = [i for i, depth in enumerate(depths(text)) if depth == 0 and text[i] in separators]
    return [text[before + 1 : cut] for before, cut in pairwise([-1, *cuts, len(text)])]


_WRITTEN = r"[+-]?(?:\d+(?:\.\d+)?(?:/\d+)?|\\frac ?\{-?\d+\} ?\{\d+\})"
_SPACED = re.compile(rf"(?P<open>^|[(\[]|\\\{{) ?(?P<items>{_WRITTEN}(?: {_WRITTEN})+) ?(?P<close>$|[)\]]|\\\}})")


def with_commas(text: str) -> str:
    """``text`` with commas between numbers that only spaces separate, which math-verify multiplies: ``(1 2 3)`` is
    ``(1, 2, 3)``, and ``1 2 3`` a list in that order. ``3 1/2`` and ``1 000`` are one number."""

    def listed(group: re.Match[str]) -> str:
        if read_number(group["items"]) is not None or (group["open"] == "") != (group["close"] == ""):
            return group[0]
        return (group["open"] or "(") + group["items"].replace(" ", ", ") + (group["close"] or ")")

    return _SPACED.sub(listed, text) if " " in text else text


_PART = re.compile(r"(?:^|(?<=[\s,;.]))(?:\\text ?\{ ?(?:part )?)?\(?([a-h])\)[ :.]*\}?", re.IGNORECASE)


def parts(text: str) -> list[str] | None:
    """The answers to the parts of a question, ``(a) 3 (b) 5``, if these are named in order."""
    labels = list(_PART.finditer(text)) if ")" in text else []
    named = [label[1].lower() for label in labels]
    if len(labels) < 2 or labels[0].start() > 0 or named != list("abcdefgh")[: len(named)]:
        return None
    bounds = [label.span() for label in labels] + [(len(text), len(text))]
    return [text[end:start].strip(" ,;.") for (_, end), (start, _) in pairwise(bounds)]


_ROW = re.compile(r"(?<![\d.])-?\d{1,6}(?![\d.])(?:, ?-?\d{1,6}(?![\d.]))*+(?:, ?(?P<dots>\\ldots) ?, ?-?\d{1,6})?")
_LONGEST_ROW = 200


def without_dots(text: str) -> str:
    r"""``text`` with the numbers that dots stand for: ``0,1,\ldots,4`` is ``0,1,2,3,4``."""

    def written_out(row: re.Match[str]) -> str:
        if not row["dots"]:
            return row[0]
        *first, last = map(int, re.findall(r"-?\d+", row[0]))
        step = first[1] - first[0] if len(first) > 1 else 1
        if step == 0 or (last - first[0]) % step or not len(first) < (last - first[0]) // step < _LONGEST_ROW:
            return row[0]
        full = list(range(first[0], last + (1 if step > 0 else -1), step))
        return ", ".join(map(str, full)) if full[: len(first)] == first else row[0]

    return _ROW.sub(written_out, text) if r"\ldots" in text else text


_INTERVAL = re.compile(r"\s*[(\[][^()\[\],]+,[^()\[\],]+[)\]]\s*")


def as_union(text: str) -> str:
    """A list of intervals as their union; anything else unchanged."""
    intervals = split_top(text)
    return r" \cup ".join(intervals) if len(intervals) > 1 and all(map(_INTERVAL.fullmatch, intervals)) else text


_LINE = re.compile(r"\(?\\begin\s*\{([bp]?matrix|array)\}(?:\{[clr]+\})?((?:(?!\\end).)*)\\end\s*\{\1\}\)?")
_TRANSPOSED = re.compile(r"\s*\^\s*\{?\s*(?:\\text\s*\{\s*T\s*\}|T|\\top|\\intercal)\s*\}?$")


def as_tuple(text: str) -> str | None:
    """A matrix of one row or column, or a tuple with a sign of transposition, as a tuple; ``None`` for all else."""
    vector = _TRANSPOSED.sub("", text)
    if line := _LINE.fullmatch(vector):
        entries = line[2].split(r"\\" if r"\\" in line[2].strip().removesuffix(r"\\") else "&")
        return _tuple(entries) if len(entries) > 1 and not any("&" in entry for entry in entries) else None
    kind, items = read_list(vector)
    return _tuple(items) if len(items) > 1 and (kind == "[]" or (kind == "()" and vector != text)) else None


_WITH_CONDITION = re.compile(
    r"(.*[^\s,;(])\s*(?:[,;]\s*(?:\\text ?\{ ?for ?\} ?)?|\\text ?\{ ?for ?\} ?|(\())\s*([^,;()]+)\)?"
)


def split_condition(text: str) -> tuple[str, str]:
    r"""``(value, condition)`` of ``\frac1x, x\ne0`` and ``2k\pi, k\in\mathbb{Z}``; the condition is ``""`` if there is
    none, or if the value is itself a condition."""
    match = _WITH_CONDITION.fullmatch(text)
    if match is None or not _CONDITION.search(match[3]) or _CONDITION.search(match[1]) or "(" in match[3]:
        return text, ""
    if text.endswith(")") != (match[2] is not None):
        return text, ""
    return match[1].strip(), match[3].strip()


_CONDITION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_OVER_INTEGERS = re.compile(r"([A-Za-z])\s*\\in\s*\\mathbb\s*\{Z\}")


def renamed(text: str, letter: str, name: str) -> str:
    """``text`` with ``name`` in place of a letter that is a variable."""
    return re.sub(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", f" {name} ", text)


def general_solutions(gold: str, answer: str, name: str) -> tuple[str, str]:
    r"""Both sides with ``name`` in place of the letter that stands for every integer, which may be another on each
    side and whose ``, k\in\mathbb{Z}`` one side may leave out."""
    split = [split_condition(side) for side in (gold, answer)]
    letters = [match[1] if (match := _OVER_INTEGERS.fullmatch(condition)) else "" for _, condition in split]
    if not any(letters):
        return gold, answer
    sides = []
    for (value, _), side, letter in zip(split, (gold, answer), letters, strict=True):
        value = value.replace(r"\lor", ",") if letter else side
        if not letter:
            free = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", re.sub(r"[A-Za-z]\s*=", "", side)))
            letter = free.pop() if len(free) == 1 else ""
        sides.append(renamed(value, letter, name) if letter else value)
    return sides[0], sides[1]


_WRAPPED = re.compile(r"(?s)\s*(\\\{|[(\[])(.*?)(\\\}|[)\]])\s*")


@lru_cache(maxsize=8192)
def read_list(text: str) -> tuple[str, tuple[str, ...]]:
    """``(brackets, items)`` of canonical ``text``; the brackets are ``{}`` for a set, ``()``, ``[]``, ``(]`` or ``[)``,
    and ``""`` without brackets around the whole text."""
    wrapped = _WRAPPED.fullmatch(text)
    brackets = ""
    kind = (wrapped[1] + wrapped[3]).replace("\\", "") if wrapped else ""
    if wrapped and kind in ("{}", "()", "[]", "(]", "[)") and min(depths(wrapped[2]), default=0) >= 0:
        brackets, text = kind, wrapped[2]
    groups = split_top(text, ";")
    if len(groups) > 1 and not brackets and any(len(split_top(group)) > 1 for group in groups):  # x=1, y=2; x=3, y=4
        assigned = [read_assignments(group) for group in groups]
        tuples = [_tuple(v for _, v in a) if a else f"({g})" for a, g in zip(assigned, groups, strict=True)]
        return "", tuple(tuples)
    return brackets, tuple(part.strip() for part in split_top(text))


@lru_cache(maxsize=8192)
def read_assignments(text: str) -> tuple[tuple[str, str], ...] | None:
    """(name, value) pairs of ``x=1, y=2`` or ``(x,y)=(1,2)``; ``None`` for anything else, such as a name that occurs
    twice."""
    named = _NAMED_TUPLE.fullmatch(text)
    if named:
        names = [name.strip() for name in named[1].split(",")]
        tuples = split_top(named[2])
        values = split_top(tuples[0].strip()[1:-1]) if len(tuples) == 1 else []
        pairs = list(zip(names, values, strict=True)) if len(names) == len(values) else []
    else:
        matches = [_ASSIGNMENT.fullmatch(part) for part in split_top(text)]
        pairs = [(m[1], m[2]) for m in matches if m is not None]
        if len(pairs) < len(matches):
            return None
    if len(pairs) < 2 or len({name for name, _ in pairs}) < len(pairs):
        return None
    return tuple((name, value.strip()) for name, value in pairs)


def align_assignments(gold: str, answer: str) -> tuple[str, str] | None:
    """(gold, answer) as tuples of values in the order of the gold side's names, if one side or both assign values.

    For the gold answer ``x=1, y=2``, both ``y=2, x=1`` and ``(1,2)`` give ``(1, 2)``, and ``(2,1)`` gives ``(2, 1)``,
    also where it is written ``y=2, x=1``.
    If only the answer has names, its values are put in the order of its sorted names. The answer is ``""`` if both
    sides have names and these differ. ``None`` if the sides cannot be read this way.
    """
    gold_pairs, pairs = read_assignments(gold), read_assignments(answer)
    if gold_pairs is not None and pairs is not None:
        values = dict(pairs)
        same_names = values.keys() == {name for name, _ in gold_pairs}
        aligned = _tuple(values[name] for name, _ in gold_pairs) if same_names else ""
        return _tuple(value for _, value in gold_pairs), aligned
    named, bare = (pairs, gold) if gold_pairs is None else (gold_pairs, answer)
    if named is None or len({name.split("_")[0] for name, _ in named}) == 1:
        return None  # x_1 and x_2 are roots: their order has no meaning
    in_brackets = re.fullmatch(r"\([^()]*\)", bare.strip()) is not None
    items = split_top(bare[1:-1] if in_brackets else bare)
    if len(items) != len(named) or re.match(r"\s*\\\{", bare) or "=" in bare:
        return None
    if gold_pairs is not None:  # a point has its coordinates in alphabetical order
        return _tuple(value for _, value in (sorted(gold_pairs) if in_brackets else gold_pairs)), _tuple(items)
    # else the gold answer may be a list, whose order has no meaning
    return (_tuple(items), _tuple(value for _, value in sorted(named))) if in_brackets else None


def _tuple(values: Iterable[str]) -> str:
    return "(" + ", ".join(value.strip() for value in values) + ")"


def decimal_comma(text: str) -> str | None:
    """``text`` with a decimal point if it is a number with a decimal comma, else ``None``; ``1,234`` may have a
    thousands separator and gives ``None``."""
    match = _DECIMAL_COMMA.fullmatch(text)
    if match is None or (len(match[2]) == 3 and match[1].isdigit() and match[1] != "0"):
        return None
    return re.sub("[. ]", "", match[1]) + "." + match[2]


def is_decimal_comma(text: str) -> bool:
    """True if the comma of a gold answer is no list's: ``0,5`` and ``1,25``, not ``1,2``."""
    match = _DECIMAL_COMMA.fullmatch(text)
    return match is not None and (len(match[2]) > 1 or match[1].lstrip("+-") == "0" or not match[1].isdigit())


_ROUNDED = re.compile(r"((?:[^=A-Za-z\\]|\\(?:sqrt|frac|pi|ln|log|cdot)(?![A-Za-z]))*+)=\s*(-?\d*\.\d+)")


def exact_side(text: str) -> tuple[str, str]:
    r"""``(exact, approximate)`` of ``a \approx b`` and ``\sqrt2=1.414``; the second is empty for ``x \approx a`` and
    where there is none."""
    first, sign, rest = text.partition(r"\approx")
    if not sign and (rounded := _ROUNDED.fullmatch(text)) and read_number(rounded[1]) is None:
        return rounded[1].strip(), rounded[2]
    if not sign or r"\approx" in rest:
        return text, ""
    if not first.strip() or re.fullmatch(_NAME, first.strip()):
        return (first.strip() + "=" if first.strip() else "") + rest.strip(), ""
    return first.strip(), rest.strip()


_LONE_SIGN = re.compile(r"[-+*/<>=]|\\(?:times|div|cdot|pm|mp|le|ge|ne|lt|gt|in|cup|cap|subset|approx|equiv|cong)")
_DANGLING = re.compile(
    r"(?:[+*/^_=<>-]|\\(?:cdot|times|div|pm|le|ge|ne|frac|sqrt|cup|cap|in|int|sum|prod|lim))\s*$"
    r"|^\s*[*/=]|^\s*[_^]\s*(?:\{[^{}]*\}|\\[a-zA-Z]+|\w)?\s*$"
    r"|\\frac\s*\{[^{}]*\}\s*(?:$|[^\s{\d\w\\]|\{\s*\})|\\(?:frac|sqrt|binom)\s*\{\s*\}"
)


def is_malformed(text: str) -> bool:
    """True for a gold answer with an operator or command that lacks an operand.

    A sign alone may be an answer (which sign is it?), and ions, one-sided limits and school marks end in one (``Na^+``,
    ``0^-``, ``A+``); those are not malformed.
    """
    if _LONE_SIGN.fullmatch(text) or re.search(r"\^\s*[+*-]$|^[A-Za-z]\s?[+-]$", text):
        return False
    return _DANGLING.search(text) is not None


def is_notation(text: str) -> bool:
    """True for answers that a person can read even where a parser cannot: as many opening as closing brackets, no
    operator without an operand, and at least one letter, digit or sign."""
    paired = sum(text.count(c) for c in "([{") == sum(text.count(c) for c in ")]}")
    return paired and not is_malformed(text) and re.search(r"[\w<>=+*/-]", text) is not None
