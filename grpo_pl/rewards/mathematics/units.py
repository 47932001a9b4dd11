"""Units, nouns and magnitudes after a number: which may be left out, and which make it a different answer."""

from __future__ import annotations

import re
from functools import lru_cache

from grpo_pl.rewards.mathematics.answer_text import CURRENCIES, is_word, read_number

_UNIT_NAMES = {
    "m": "meter meters metre metres",
    "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres",
    "km": "kilometer kilometers kilometre kilometres kms",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams",
    "kg": "kilogram kilograms kgs",
    "mg": "milligram milligrams",
    "t": "ton tons tonne tonnes",
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
    "dollar": "dollars usd USD",
    "cent": "cents",
    "euro": "euros EUR",
    "sterling": "GBP",
    "yen": "JPY",
    "degree": "degrees deg",
    "degree C": "Celsius",
    "degree F": "Fahrenheit",
    "radian": "radians rad",
    "Hz": "hertz",
    "N": "newton newtons",
    "J": "joule joules",
    "W": "watt watts",
    "V": "volt volts",
    "Pa": "pascal pascals",
    "K": "kelvin kelvins",
    "mol": "mole moles",
    "unit": "units",
    "mph": "miles/hour mi/h",
    "km/h": "kph kmh kmph kilometers/hour",
    "m/s": "meters/second",
}
_UNITS = {alias: unit for unit, names in _UNIT_NAMES.items() for alias in [unit, *names.split()]}
_AREA = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_POWERS = {"squared": "^2", "cubed": "^3"}
_BARE = [unit for unit in _UNITS if len(unit) > 1 and (unit.islower() or unit in ("mL", "USD", "EUR", "Hz", "Pa"))]
_WORDS = "|".join(sorted(map(re.escape, _BARE), key=len, reverse=True))
_LETTERS = "|".join(u for u in _UNITS if len(u) == 1)
_RAISE = r"(?:\^\s*\{?\s*(?P<raise>[23])\s*\}?)?"
_UNIT_ENDINGS = [
    re.compile(rf"(?P<core>[^\s].*?)\s*\\text\s*\{{(?P<unit>[^{{}}]*)\}}\s*{_RAISE}"),
    re.compile(r"(?P<core>.*[^\s^])\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\s*\{\s*)?(?P<unit>[CFcf])\s*\}?"),
    re.compile(r"(?P<core>.*[^\s^])\s*\^\s*\{?\s*(?P<unit>\\circ)\s*\}?"),
    re.compile(rf"(?P<core>.*[\d}})])\s*(?P<unit>(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{_WORDS}))\s*{_RAISE}"),
    re.compile(rf"(?P<core>.*[\d}})])\s+(?P<unit>{_LETTERS})\s*{_RAISE}"),
    re.compile(r"(?P<core>.*\d)\s+(?P<unit>[^\W\d_]{2,}(?: [^\W\d_]{2,}){0,2})"),
]
_MAGNITUDES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_MAGNITUDES |= {name + "s": factor for name, factor in _MAGNITUDES.items()}
_NOUN = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_NO_NOUN = frozenset(
    re.findall(
        r"\S+",
        """
    and or nor xor but if then else than not no none never neither nothing nope without except unless isn't wrong false
    incorrect right correct true maybe perhaps possibly probably either both between approximately approx about around
    nearly almost roughly more less fewer greater most least over under above below times plus minus divided multiplied
    squared cubed half halves quarter quarters third thirds double twice triple is are was equals equal be to in of the
    mod modulo base factorial root sqrt log pi infinity inf undefined zero one two three four five six seven eight nine
    ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty
    seventy eighty ninety dozen dozens score gross hundred thousand million billion trillion quadrillion quintillion
    sextillion googol lakh lakhs crore crores myriad k M B bn mn tn mln mld bln mio mrd tsd mil bil tril hundreds
    thousands millions billions trillions tenth tenths hundredth hundredths thousandth thousandths millionth millionths
    percent percentage pct permille oder und nicht kein keine nein nie falsch richtig vielleicht etwa hundert tausend
    millionen milliarde milliarden billionen dutzend ou et pas non ne jamais faux cent mille milliard milliards douzaine
    o y nunca jamás falso quizás cien ciento miles millón millones billón billones docena oppure mai forse cento mila
    milione milioni miliardo miliardi dozzina e não talvez milhão milhões bilhão bilhões dúzia en niet geen nooit
    honderd duizend miljoen miljard lub i nigdy sto tysiąc tysiące tysięcy milion miliony miliard или и не нет никогда
    сто тысяча тысячи тысяч миллион миллиона миллионов миллиард миллиарда миллиардов дюжина
    """,
    )
)
_NO_NOUN_SIGNS = frozenset("不没沒非无無未或和与與但错錯百千万萬亿億兆십백천만억없")


@lru_cache(maxsize=8192)
def split_unit(text: str) -> tuple[str, str]:
    """Splits canonical ``text`` into ``(quantity, unit)``; the unit is ``""`` if there is none.

    A unit of measure is returned in one spelling (``meters`` is ``m``), a single other noun after a number unchanged. A
    magnitude is multiplied out: ``5 million dollars`` is ``5000000`` and ``dollar``. Anything else, such as ``or``, a
    negation or a remark, is no unit and stays in the quantity.
    """
    text = " ".join(text.split())  # the regular expressions would try every split of a run of white space
    sign = re.match(r"([+-]?)\s*\\text\s*\{\s*(\w+)\s*\}\s*([+-]?\s*[\d.].*|\\frac.*)", text)
    if sign and sign[2] in {"dollar", *CURRENCIES.values()}:
        quantity, unit = split_unit((sign[1] + sign[3]).strip())
        if unit in ("", sign[2]):
            return quantity, sign[2]
    for ending in _UNIT_ENDINGS:
        match = ending.fullmatch(text)
        if (
            not match
            or not re.search(r"[\d}]|\\pi", match["core"])
            or r"\text" in match["core"]
            or match["core"].endswith(r"\%")
        ):
            continue
        core = match["core"].strip()
        bare = ending is _UNIT_ENDINGS[-1]
        words = match["unit"].split()
        if words and words[0].casefold() in _MAGNITUDES:
            number = read_number(core)
            if number is None:
                continue
            value = number.value * _MAGNITUDES[words[0].casefold()]
            core = str(value) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
            words = words[2:] if words[1:2] == ["of"] else words[1:]
        elif bare and not is_word(words[0]):
            continue
        name = _unit_name(" ".join(words)) if ending is not _UNIT_ENDINGS[1] else f"degree {match['unit'].upper()}"
        if name is not None:
            raised = match.groupdict().get("raise")
            return core, name + (f"^{raised}" if raised else "")
    return text, ""


def _unit_name(text: str) -> str | None:
    """The unit or noun in one spelling; ``None`` for words that are neither, ``""`` for no words."""
    if text == r"\circ":
        return "degree"
    text = re.sub(r"(?<=\b[^\W\d_])\.\s?(?=[^\W\d_]?\b)", "", text.strip().rstrip(".!"))
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", text).split()
    if not words:
        return ""
    power = ""
    if len(words) > 1 and words[0].rstrip(".").lower() in _AREA:
        power = _AREA[words.pop(0).rstrip(".").lower()]
    elif len(words) > 1 and words[-1].lower() in _POWERS:
        power = _POWERS[words.pop().lower()]
    parts = []
    for part in " ".join(words).split("/"):
        base, _, raised = part.partition("^")
        name = _UNITS.get(base, _UNITS.get(base.lower()))
        if name is None and (not is_noun(base) or part != base):
            return None
        parts.append((name or base) + (f"^{raised.strip('{} ')}" if raised else ""))
    joined = "/".join(parts)
    return _UNITS.get(joined, joined) + power


def is_noun(word: str) -> bool:
    """True for one word that may follow a number without changing it; false for ``or``, ``not``, ``million`` …"""
    if not _NOUN.fullmatch(word) or not _NO_NOUN.isdisjoint({word, word.casefold()}):
        return False
    return _NO_NOUN_SIGNS.isdisjoint(word)


def same_unit(one: str, other: str) -> bool:
    """True for one unit or noun twice, in singular or plural; units of measure are given in one spelling."""
    return one == other or _stem(one) == _stem(other)


def _stem(noun: str) -> str:
    noun = noun.casefold()
    for ending, stem in (("people", "person"), ("children", "child"), ("women", "woman"), ("men", "man")):
        if noun == ending:
            return stem
    if noun.endswith("ies") and len(noun) > 4:
        return noun[:-3] + "y"
    if re.search(r"(?:s|x|z|ch|sh)es$", noun):
        return noun[:-2]
    return noun[:-1] if noun.endswith("s") and not noun.endswith("ss") else noun


def is_measure(unit: str) -> bool:
    """True for units of measure; false for nouns such as ``apples`` and ``people``."""
    return any(part.split("^")[0] in _UNIT_NAMES for part in unit.split("/")) if unit else False
