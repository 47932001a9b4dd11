"""Units, nouns and magnitudes after a number: which may be left out, and which make it a different answer."""

from __future__ import annotations

import re
from functools import lru_cache

from grpo_pl.rewards.mathematics.canonical import CURRENCIES
from grpo_pl.rewards.mathematics.measures import FOLDED, SYMBOLS, UNITS, read_measure, same_measure
from grpo_pl.rewards.mathematics.nouns import is_plural, same_noun, stems
from grpo_pl.rewards.mathematics.words import is_word, turns, words_of
from grpo_pl.rewards.mathematics.written_numbers import number_in_words, read_number

_AREA = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_BARE = words_of(
    "cm mm km in ft yd mi kg mg lb lbs oz sec secs min mins hr hrs yr yrs gal ml mph kph kmh kms kgs deg rad usd"
)
"""Symbols in small letters that are units directly behind a number, where others may be products of variables."""
_RAISE = r"(?:\^\s*\{?\s*(?P<raise>[23])\s*\}?)?"
_TEXT = r"\\text\s*\{(?P<unit>(?:[^{}]|\{[^{}]*\})*)\}"
_NO_LETTERS = re.compile(r"\\[A-Za-z]+|\d[eE][+-]?\d")
"""What holds letters in a number."""
_NUMERIC_END = r"(?:[\d})]|\\pi(?![a-zA-Z]))"
_UNIT_ENDINGS = {
    "text": re.compile(rf"(?P<core>[^\s].*?)\s*{_TEXT}\s*{_RAISE}"),
    "temperature": re.compile(
        r"(?P<core>.*[^\s^])\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\s*\{\s*)?(?P<unit>[CFcf])\s*\}?"
    ),
    "degree": re.compile(r"(?P<core>.*[^\s^])\s*\^\s*\{?\s*(?P<unit>\\circ)\s*\}?"),
    "symbol": re.compile(
        rf"(?P<core>.*{_NUMERIC_END})(?P<gap>\s*)"
        r"(?P<unit>(?:(?:square|sq|cubic|cu)\.?\s+)?[^\W\d_]{2,}(?:/[^\W\d_]+)?|[mk]/[sh])"
        rf"\s*{_RAISE}"
    ),
    "letter": re.compile(rf"(?P<core>.*{_NUMERIC_END})\s+(?P<unit>[mgtshlLNJWVK])\s*{_RAISE}"),
    "words": re.compile(r"(?P<core>.*\d)\s+(?P<unit>[^\W\d_]{2,}(?: [^\W\d_]{2,}){0,3})"),
}
_CURRENCY_NAMES = frozenset(["dollar", *CURRENCIES.values()])
_CURRENCY_FIRST = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?:US\s*)?\\text\s*\{\s*(?P<name>\w+)\s*\}|(?P<code>[A-Z]{3}))"
    r"\s*(?P<number>[+-]?\s*[\d.].*|\\frac.*)"
)
ANGLE_OF = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_OHMS = re.compile(r"(?<=[\d\s}])(?:\\text\s*\{\s*(?P<prefix>[kMmμ])\s*\}\s*)?\\Omega\s*$")
_MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NOUN = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_NO_NOUN = words_of("""
    and if then no none false incorrect maybe perhaps possibly probably either both between approximately about around
    nearly almost roughly more less fewer over under above below times plus minus half halves quarter quarters double
    twice triple modulo base to in of is are negative imaginary percent cent
    dozen gross hundred thousand million billion trillion lakh crore k M B
    """)
"""Words that change the number before them, or say that it is none."""
_GROUPS = words_of("pair couple twin trio score ten one zero decimal")
"""Nouns that are several, or parts of a number: six pairs are twelve."""
_ORDINAL = re.compile(r"thirds?|.*(?:fif|six|ven|eigh|nin|te?en|twelf|tie|dred|sand|llion)ths?", re.IGNORECASE)
_ALSO_UNITS = frozenset({"in", "miles", "cent", "B"})
_FACTOR = re.compile(
    r"\s*(?:(?P<divide>/|\\div(?![a-zA-Z])|(?i:per)\b|(?<=\s)an?\s|\\frac)|(?P<times>\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z])|\*|⋅)"
    r"|\^\s*\{?\s*(?P<power>[+-]?\d)\s*\}?|\^?\s*\{?\s*\\circ\s*\}?\s*(?P<circ>[CFcf]?)(?![a-zA-Z])"
    r"|(?P<word>[^\W\d_](?:\.[^\W\d_])+\.?|[^\W\d_]+(?:[-'’][^\W\d_]+)*|¢)\.?)\s*"
)
_BELOW = re.compile(r"/\s*\(([^()/]*)\)")
_FRACTION_OF_UNITS = re.compile(
    r"\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}(\s*\^\s*\{?\s*[23]\s*\}?)?\s*\}"
)
_JOINED = re.compile(
    r"\\text\s*\{([^{}]*)\}\s*(\^\s*(?:-?\d|\{\s*-?\d\s*\}))?\s*(/|\\cdot(?![a-zA-Z])|\s)\s*\\text\s*\{([^{}]*)\}"
)
_RAISED_LAST = re.compile(r"(\\text\s*\{[^{}]*)\}\s*\^\s*(?:\{\s*(-\d)\s*\}|(-\d))\s*$")


@lru_cache(maxsize=8192)
def split_unit(text: str) -> tuple[str, str]:
    """Splits canonical ``text`` into ``(quantity, unit)``; the unit is ``""`` if there is none.

    A unit of measure is returned in one spelling (``meters`` is ``m``), another noun after a number unchanged. A
    magnitude is multiplied out: ``5 million dollars`` is ``5000000`` and ``dollar``. Anything else, such as ``or``, a
    negation or a remark, is no unit and stays in the quantity.
    """
    text = " ".join(text.split())  # the regular expressions would try every split of a run of white space
    currency = _CURRENCY_FIRST.fullmatch(text)
    name = read_measure(currency["name"] or currency["code"]) if currency else None
    if currency and name in _CURRENCY_NAMES:
        quantity, unit = split_unit((currency["sign"] + currency["number"]).strip())
        if unit in ("", name):
            return quantity, name
        if unit.startswith("1/"):
            return quantity, name + unit[1:]
    text = _OHMS.sub(lambda ohms: rf"\text{{ {ohms['prefix'] or ''}Ω}}", text)
    if text.count(r"\text") > 1 or r"\mu" in text or "^" in text:
        text = _join_units(text)
    for kind, ending in _UNIT_ENDINGS.items():
        match = ending.fullmatch(text)
        if match is None:
            continue
        core, written = match["core"].strip(), match["unit"].strip()
        if not re.search(r"[\d}]|\\pi", core) or r"\text" in core or core.endswith(r"\%"):
            continue
        if kind in ("symbol", "letter", "words") and re.search("[A-Za-z]", _NO_LETTERS.sub("", core)):
            continue  # c^2 m
        if kind == "degree" and ANGLE_OF.search(core):
            continue  # of an angle, not of the answer
        if kind == "letter" and not re.search(r"\d", core):
            continue  # \pi s^2
        if kind == "temperature":
            return core, f"degree {written.upper()}"
        if kind == "symbol" and not _is_symbol(written, spaced=bool(match["gap"]), raised=bool(match["raise"])):
            continue
        if kind == "text" and core.endswith("/"):
            core, written = core[:-1].strip(), "/" + written
        words = written.split()
        if words and words[0].casefold() in _MAGNITUDES:
            number = read_number(core)
            if number is None:
                continue
            core = str(number.value * _MAGNITUDES[words[0].casefold()])  # 5000000 or 5/2
            words = words[2:] if words[1:2] == ["of"] else words[1:]
        elif kind == "words" and not is_word(words[0]):
            continue
        raised = match.groupdict().get("raise")
        name = _unit_name(" ".join(words) + (f"^{raised}" if raised else ""))
        if name is not None:
            return core, name
    return text, ""


def _join_units(text: str) -> str:
    r"""Canonical ``text`` with neighbouring units such as ``\text{m}/\text{s}`` in one ``\text{…}``."""
    text = _RAISED_LAST.sub(
        r"\1^\2\3}", _FRACTION_OF_UNITS.sub(r"\\text{\1/\2\3}", text).replace(r"\mu\text{", r"\text{μ")
    )

    def join(match: re.Match[str]) -> str:
        first, power, between, second = match.groups()
        units = [_unit_name(part) for part in (first, second)]
        if not all(units) or not all(is_measure(unit or "") for unit in units):
            return match.group()
        return rf"\text{{{first}{(power or '').replace('{', '').replace('}', '')}{between} {second}}}"

    while (joined := _JOINED.sub(join, text)) != text:
        text = joined
    return text


_AMOUNT = re.compile(
    r"\s*(?P<comma>,\s*)?"
    r"(?P<number>\d[\d.]*(?:[, ]\d{3})*(?!\d)(?: ?\\frac ?\{\d+\} ?\{\d+\}| \d+/\d+|/\d+)?|\\frac ?\{\d+\} ?\{\d+\})"
    r"(?:\s*\\text\s*\{(?P<text>[^{}]*)\}(?P<power>\s*\^\s*\{?[23]\}?)?"
    r"|(?P<gap>\s*)(?P<bare>[A-Za-zμ]+)\.?(?=[\s,\d]|$))?"
)


def amounts(text: str) -> tuple[tuple[tuple[str, str], ...], bool]:
    r"""``((number, what it counts), …)`` of two or more amounts in a row, such as ``2\text{ hours }30\text{ minutes}``,
    ``6 ft 2 in`` and ``7\text{ R }3``, and whether commas separate them; ``()`` for anything else."""
    found, at, commas = list[tuple[str, str]](), 0, False
    while at < len(text) and (amount := _AMOUNT.match(text, at)):
        words = (amount["text"] or amount["bare"] or "").strip(" ,.").removesuffix(" and")
        last = amount.end() == len(text)
        lone = amount["bare"] is not None and len(words) == 1 and not read_measure(words)
        if (not words and not last) or (lone and not (amount["gap"] and text[amount.end() :].startswith(" "))):
            return (), False
        commas = commas or (amount["comma"] is not None and at > 0)
        name = _unit_name(words + (amount["power"] or ""))
        found.append((amount["number"], words.casefold() if name is None else name))
        at = amount.end()
    return (tuple(found), commas) if at == len(text) and len(found) > 1 and found[0][1] else ((), False)


def _is_symbol(written: str, *, spaced: bool, raised: bool) -> bool:
    """True for a unit that is recognised without ``\text`` around it: one that is no product of variables."""
    if raised and not spaced and not written.endswith(("m", "in", "ft", "yd", "mi")):
        return False  # 8Tb^2: behind a number, without a space, only lengths are squared and cubed
    *_, word = written.split()
    if "/" in word:
        return all(read_measure(part) for part in word.split("/"))
    if word in _BARE:
        return True
    if (word.islower() and len(word) < 4) or (word.isupper() and not spaced):
        return False
    return (spaced or len(word) != 2 or word in SYMBOLS) and read_measure(word) is not None  # 4tW^2


@lru_cache(maxsize=8192)
def _unit_name(text: str) -> str | None:
    """The unit or noun in one spelling, such as ``kg·m/s^2``; ``None`` for words that are neither, ``""`` for none."""
    text = _BELOW.sub(lambda below: "/" + "/".join(below[1].split()), text.strip(" .!,"))
    tokens = list(_FACTOR.finditer(text))
    if "".join(token.group() for token in tokens) != text:
        return None
    words = [re.sub(r"\.", "", token["word"] or "") for token in tokens]
    factors: dict[str, int] = {}
    noun: list[str] = []
    last, sign, power, skip = "", 1, 1, False
    for i, token in enumerate(tokens):
        word, following = words[i], words[i + 1] if i + 1 < len(words) else ""
        if skip:
            skip = False
            continue
        if word.casefold() in _AREA and (following.casefold() in ("unit", "units") or read_measure(following)):
            power = _AREA[word.casefold()]
            continue
        if word == "of" and (factors or noun):
            whole = [part for part in words[i + 1 :] if part not in ("the", "a", "an")]
            if not (whole and all(map(is_noun, whole))):
                return None
            break
        raised = int(token["power"] or 1)
        if raised != 1:
            if not last:
                return None
            factors[last] *= raised
            continue
        two, pieces = read_measure(f"{word} {following}") if following else None, word.split("-")
        if token["circ"] is not None:
            found = ["degree" + (f" {token['circ'].upper()}" if token["circ"] else "")]
        elif two:
            found, skip = [two], True
        elif word and (word in _ALSO_UNITS or word not in _NO_NOUN) and (unit := read_measure(word)):
            found = [unit]
        elif len(pieces) > 1 and all(read_measure(piece) for piece in pieces):
            found = [read_measure(piece) or "" for piece in pieces]
        elif word:
            if not is_noun(word):
                return None
            noun.append(word)
            if following and not read_measure(following) and following not in ("of", *_AREA):
                continue
            found, noun = [" ".join(noun)], []
        else:
            sign = -1 if token["divide"] else 1
            continue
        for name in found:
            for last, exponent in _factors(name):
                factors[last] = factors.get(last, 0) + sign * power * exponent
        sign, power = 1, 1
    return _product(factors)


def _factors(name: str) -> list[tuple[str, int]]:
    """The units and nouns of ``kg·m/s^2`` with their exponents."""
    above, *below = name.split("/")
    found = []
    for side, sign in [(above, 1), *((side, -1) for side in below)]:
        for factor in side.split("·"):
            base, _, power = factor.partition("^")
            found += [(base, sign * int(power or 1))] if base not in ("", "1") else []
    return found


def _product(factors: dict[str, int]) -> str:
    """The inverse of `_factors`, in alphabetical order."""
    above, below = (
        "·".join(base + (f"^{abs(p)}" if abs(p) > 1 else "") for base, p in sorted(factors.items()) if sign * p > 0)
        for sign in (1, -1)
    )
    return f"{above or 1}/{below.replace('·', '/')}" if below else above


def is_noun(word: str) -> bool:
    """True for one word that may follow a number in a gold answer; false for ``or``, ``not``, ``million`` …"""
    if not _NOUN.fullmatch(word) or _ORDINAL.fullmatch(word) or turns(word) or number_in_words(word):
        return False
    return _NO_NOUN.isdisjoint({word, *stems(word)})


def is_known(unit: str, quantity: str = "") -> bool:
    """True for units of measure and for nouns that may follow a number where the gold answer has none: in the plural,
    or behind a 1. ``5 B`` may be bytes or billions."""
    names = [name for name, _ in _factors(unit) if name not in UNITS or name == "B"]
    return all((quantity == "1" or is_plural(name)) and _GROUPS.isdisjoint(stems(name.split()[-1])) for name in names)


def same_unit(gold: str, answer: str) -> bool:
    """True for one unit or noun twice, nouns in singular or plural; units of measure are given in one spelling. Where a
    price is asked for, what it is the price of may be left out: a dollar answers a dollar per pound."""
    if gold == answer or (answer in _CURRENCY_NAMES and gold.startswith(f"{answer}/")):
        return True
    ours, theirs = _factors(gold), _factors(answer)
    if [power for _, power in ours] != [power for _, power in theirs]:
        return False
    for (one, _), (other, _) in zip(ours, theirs, strict=True):
        are_nouns = not any(name in UNITS or name.casefold() in FOLDED for name in (one, other))
        if not (same_measure(one, other) or (are_nouns and same_noun(one, other))):
            return False
    return True


def is_measure(unit: str) -> bool:
    """True for units of measure; false for nouns such as ``apples`` and ``people``."""
    return any(name in UNITS for name, _ in _factors(unit)) if unit else False
