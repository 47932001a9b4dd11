"""Reads names and symbols of units of measure in one spelling; case counts where it carries meaning."""

from __future__ import annotations

import re
from collections import defaultdict

_PREFIXES = {
    "k": "kilo", "M": "mega", "G": "giga", "T": "tera", "P": "peta", "E": "exa", "h": "hecto", "d": "deci",
    "c": "centi", "m": "milli", "μ": "micro", "n": "nano", "p": "pico", "f": "femto", "Ki": "kibi", "Mi": "mebi",
    "Gi": "gibi", "Ti": "tebi",
}  # fmt: skip
_USUAL = "k M G T m μ n p f"
_PREFIXED = [
    ("m", "meter metre", "h d c " + _USUAL),
    ("g", "gram gramme", "h d c " + _USUAL),
    ("L", "liter litre", "h d c " + _USUAL),
    ("Pa", "pascal", "h " + _USUAL),
    ("J", "joule", "E P " + _USUAL),
    ("W", "watt", "E P " + _USUAL),
    ("Wh", "", "k M G T P"),
    ("eV", "electronvolt electron-volt", "E P " + _USUAL),
    ("Hz", "hertz", "E P " + _USUAL),
    ("B", "byte", "k M G T P E Ki Mi Gi Ti"),
    ("bit", "bit", "k M G T P E Ki Mi Gi Ti"),
    ("t", "ton tonne", "k M G"),
    ("Nm", "", "k M m"),
    ("Ah", "", "k m"),
    ("cal", "calorie", "k"),
    ("bar", "bar", "k m"),
    ("pc", "parsec", "k M G"),
    ("dB", "decibel", ""),
    *((symbol, name, _USUAL) for symbol, name in [
        ("s", "second sec"), ("A", "ampere amp"), ("K", "kelvin"), ("mol", "mole"), ("cd", "candela"), ("N", "newton"),
        ("V", "volt"), ("Ω", "ohm"), ("F", "farad"), ("H", "henry"), ("T", "tesla"), ("Wb", "weber"), ("C", "coulomb"),
        ("S", "siemens"), ("lm", "lumen"), ("lx", "lux"), ("Bq", "becquerel"), ("Gy", "gray"), ("Sv", "sievert"),
    ]),
]  # fmt: skip
"""Symbol, singular names and prefixes of units."""
_UNIT_OF = {"Wh": "W·h", "Nm": "N·m", "Ah": "A·h", "B": "byte"}
_OTHERS = {
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "nmi": "nautical-mile", "lb": "lbs",
    "oz": "ounce", "fl-oz": "fluid-ounce fluid-oz", "min": "min minute", "h": "hr hour", "day": "day",
    "week": "week wk", "month": "month", "year": "year yr", "decade": "decade", "century": "century centuries",
    "gal": "gallon", "qt": "quart", "pt": "pint", "cup": "cup", "tbsp": "tablespoon", "tsp": "teaspoon", "acre": "acre",
    "ha": "hectare", "dollar": "dollar usd buck us-dollar", "cent": "cent ¢", "euro": "euro eur",
    "sterling": "gbp quid", "pound": "pound", "yen": "yen jpy", "yuan": "yuan cny rmb renminbi",
    "rupee": "rupee inr rs", "rouble": "rouble ruble rub", "won": "won krw", "franc": "franc chf", "peso": "peso mxn",
    "shekel": "shekel ils", "baht": "baht thb", "degree": "degree deg",
    "degree C": "celsius degree-celsius degrees-celsius degree-C degrees-C degC centigrade",
    "degree F": "fahrenheit degree-fahrenheit degrees-fahrenheit degree-F degrees-F degF", "rad": "radian rad",
    "sr": "steradian", "rev": "revolution", "unit": "unit", "psi": "psi", "atm": "atmosphere", "mmHg": "mmhg",
    "knot": "knot kn", "ly": "light-year lightyear", "AU": "astronomical-unit", "hp": "horsepower", "a.m.": "am",
    "p.m.": "pm", "mi/h": "mph", "km/h": "kph kmh kmph", "mi/gal": "mpg", "rev/min": "rpm", "ft/s": "fps",
}  # fmt: skip
"""Units without prefixes: symbol and names. A hyphen in a name also stands for a space."""
_SPELLINGS = {
    "l": "L", "gm": "g", "gms": "g", "kgs": "kg", "cms": "cm", "mms": "mm", "kms": "km", "cc": "cm^3", "KB": "kbyte",
    "um": "μm", "us": "μs", "ug": "μg", "mcg": "μg", "b": "bit", "Cal": "kcal",
}  # fmt: skip
_EITHER = [{"B", "byte"}, {"pound", "lb"}, {"pound", "sterling"}, {"C", "degree C"}, {"F", "degree F"}]
"""Names with two readings beside each of these."""


def _tables() -> tuple[dict[str, str], dict[str, str], dict[str, set[str]]]:
    """Symbols and names with the unit that each means, and the units that each symbol means if case is ignored."""
    symbols = dict(_SPELLINGS)
    names: dict[str, str] = {}
    for symbol, words, prefixes in _PREFIXED:
        for prefix in ["", *prefixes.split()]:
            unit = prefix + _UNIT_OF.get(symbol, symbol)
            symbols[prefix + symbol] = unit
            if symbol == "L":
                symbols[prefix + "l"] = unit
            if symbol == "bit" and prefix:
                symbols[prefix + "b"] = unit
            for word in words.split():
                names[_PREFIXES.get(prefix, "") + word] = names[_PREFIXES.get(prefix, "") + word + "s"] = unit
    symbols["B"] = "B"
    for unit, words in _OTHERS.items():
        symbols[unit] = unit
        if unit.islower():  # Ft, LB
            names[unit] = unit
        for word in words.split():
            for spelling in {word, word.replace("-", " ")}:
                names[spelling.casefold()] = names[spelling.casefold() + "s"] = unit
    symbols |= {"pm": "p.m.", "PM": "p.m.", "AM": "a.m."}  # times of day; picometers are written out
    folded: dict[str, set[str]] = defaultdict(set)
    for symbol, unit in symbols.items():
        folded[symbol.casefold()].add(unit)
    return symbols, names, dict(folded)


SYMBOLS, _NAMES, FOLDED = _tables()
UNITS = {factor for unit in {*SYMBOLS.values(), *_NAMES.values()} for factor in re.split(r"[·/^]", unit)}
"""The units as `read_measure` gives them."""


def read_measure(word: str) -> str | None:
    """The unit of measure that a symbol or a name means, in one spelling; ``None`` if there is none or several.

    Case counts in symbols: ``mW`` and ``MW``, ``s`` and ``S``, ``Gb`` and ``GB`` differ. A symbol of two letters or
    more in another case is read where one unit alone has these letters (``KM``, ``Kg``, ``hz``), and not at all where
    several do (``MHZ`` may be megahertz or millihertz). In names case does not count.
    """
    word = word.replace("\N{OHM SIGN}", "Ω").replace("\N{MICRO SIGN}", "μ")
    if unit := SYMBOLS.get(word) or _NAMES.get(word.casefold()):
        return unit
    readings = FOLDED.get(word.casefold(), set()) if len(word) > 1 else set()
    return next(iter(readings)) if len(readings) == 1 else None


def same_measure(one: str, other: str) -> bool:
    """True for one unit twice, and for a name such as ``pound`` with one of the units that it may mean."""
    return one == other or {one, other} in _EITHER
