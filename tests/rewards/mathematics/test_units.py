"""Units and nouns behind a number: which spellings are one unit, and which words change the number."""

from itertools import combinations

import pytest

from grpo_pl.rewards.mathematics.canonical import canonical
from grpo_pl.rewards.mathematics.measures import read_measure
from grpo_pl.rewards.mathematics.units import is_known, same_unit, split_unit

ONE_UNIT = [
    ["cm", "CM", "Cm", "centimeter", "Centimetres", "CENTIMETERS"], ["km", "KM", "Km", "kms", "kilometers"],
    ["kg", "KG", "Kg", "Kilograms"], ["ft", "Ft", "FT", "feet"], ["mW", "milliwatts"], ["MW", "megawatt"],
    ["kHz", "khz", "KHZ", "kilohertz"], ["MPa", "Megapascals"], ["kPa", "kpa", "KPa"],
    ["L", "l", "liters", "litre"], ["mL", "ml", "milliliters"], ["GB", "gigabytes"], ["Gb", "Gbit", "gigabits"],
    ["s", "sec", "seconds"], ["S", "siemens"], ["T", "tesla"], ["t", "tonnes"], ["H", "henry"],
    ["h", "hr", "hrs", "Hours"], ["μm", "um", "micrometers"], ["mol", "moles"], ["kcal", "Cal", "kilocalories"],
    ["m/s", "m s^-1", "meters per second", "metres/second"], ["mi/h", "mph", "MPH", "miles per hour"],
    ["kWh", "KWH", "kilowatt-hours", "kilowatt hours"], ["kg·m/s^2", "kg m/s^2", r"m \cdot kg / s^{2}"],
    ["m^2", "square meters", "sq. m", "m^{2}"], ["square units", "units^2", "sq units"],
    ["ly", "light years", "light-years"], ["°C", "degrees Celsius", "℃"],
    ["dollar/h", "dollars per hour", "dollars an hour", "USD/h"], ["a.m.", "am", "AM"],
]  # fmt: skip


@pytest.mark.parametrize("spellings", ONE_UNIT, ids=lambda spellings: spellings[0])
def test_harmless_spellings_are_one_unit(spellings: list[str]) -> None:
    read = {split_unit(canonical(rf"5\text{{ {spelling}}}")) for spelling in spellings}
    assert len(read) == 1
    assert read.pop()[0] == "5"


def test_different_units_are_told_apart() -> None:
    units = [split_unit(canonical(rf"5\text{{ {spellings[0]}}}"))[1] for spellings in ONE_UNIT]
    assert not [(one, other) for one, other in combinations(units, 2) if same_unit(one, other)]


@pytest.mark.parametrize("symbol", ["MHZ", "mhz", "Mpa", "MPA", "MM", "mb", "gb", "n", "G", "xyz", "Ml"])
def test_a_symbol_in_another_case_is_read_only_if_one_unit_has_its_letters(symbol: str) -> None:
    assert read_measure(symbol) in (None, "ML")  # Ml is a million liters by its own letters


def test_the_case_of_a_symbol_that_carries_meaning_makes_another_unit() -> None:
    pairs = "mW MW,mPa MPa,mg Mg,s S,t T,h H,Gb GB,kB kb,mL ML,mm Mm,nm Nm,mN MN,mJ MJ,ms Ms,cal Cal,GB gb,MHz mhz"
    for one, other in (pair.split() for pair in pairs.split(",")):
        read = [split_unit(rf"5\text{{ {symbol}}}")[1] for symbol in (one, other)]
        assert not same_unit(*read), (one, other)


NOUNS = """
apples people students children dollars days marbles ways points triangles solutions books boxes houses buses leaves
knives women mice vertices
"""
NO_NOUNS = """
fifths sixth thirds halves quarters hundredths twentieths pairs couples dozens scores gross trios kilo mega milli
doubled tripled squared cubed negative positive imaginary binary octal hexadecimal factorial times fold percent prime
root square ppm plus minus or not wrong maybe million mille Millionen тысяч 万 억 none nothing total
each fewer
"""


@pytest.mark.parametrize("noun", NOUNS.split())
def test_a_counted_noun_may_follow_a_number(noun: str) -> None:
    quantity, unit = split_unit(rf"6\text{{ {noun}}}")
    assert quantity == "6"
    assert is_known(unit)


@pytest.mark.parametrize("word", NO_NOUNS.split())
def test_any_other_word_may_not(word: str) -> None:
    quantity, unit = split_unit(rf"6\text{{ {word}}}")
    assert quantity != "6" or not is_known(unit)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("apples", "apple", True), ("horses", "horse", True), ("buses", "bus", True), ("zorks", "Zork", True),
        ("red balls", "balls", True), ("red balls", "blue balls", False), ("apples", "pears", False),
        ("pound", "lb", True), ("pound", "sterling", True), ("lb", "sterling", False),
        ("apples/day", "apple/day", True), ("apples/day", "apples/week", False),
    ],
)  # fmt: skip
def test_units_and_nouns_are_compared(one: str, other: str, same: bool) -> None:
    assert same_unit(one, other) is same


@pytest.mark.parametrize(
    ("text", "quantity", "unit"),
    [
        (r"6\text{ slices of pizza}", "6", "slices"), (r"6\text{ liters of red wine}", "6", "L"),
        (r"6\text{ cups of nothing}", r"6\text{ cups of nothing}", ""), 
        (r"6\,\text{m}/\text{s}^2".replace(r"\,", " "), "6", "m/s^2"), (r"6 \frac{\text{m}}{\text{s}}", "6", "m/s"),
        (r"6 \mu\text{m}", "6", "μm"), (r"\text{dollar} 6\text{ per hour}", "6", "dollar/h"),
        (r"2 \text{ million dollars}", "2000000", "dollar"), ("6 KM", "6", "km"), ("6km", "6", "km"),
        ("6 kN", "6", "kN"), (r"2\pi cm", r"2\pi", "cm"),
        (r"6\text{ N} \cdot \text{m}", "6", "N·m"),
        (r"6\text{ J/(mol K)}", "6", "J/K/mol"), (r"6\text{ k}\Omega", "6", "kΩ"), (r"6 \Omega", "6", "Ω"),
        ("USD 6.50", "6.50", "dollar"), (r"US\text{dollar} 6", "6", "dollar"), ("mc^2", "mc^2", ""),
        ("c^2 m", "c^2 m", ""), ("5mn", "5mn", ""), ("5 xy", "5 xy", ""), ("5AB", "5AB", ""), ("5m", "5m", ""),
    ],
)  # fmt: skip
def test_a_quantity_is_split_from_its_unit(text: str, quantity: str, unit: str) -> None:
    assert split_unit(text) == (quantity, unit)
