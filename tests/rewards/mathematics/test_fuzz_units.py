"""Drawn pairs of numbers with units and nouns: none that differs is paid, none that is the same is refused."""

import random
from collections.abc import Callable

import pytest

from grpo_pl.rewards import MathReward

Pair = tuple[str, str, int]
"""Gold answer, answer, and the value that a careful person would give."""

PREFIXES = {
    "G": "giga", "M": "mega", "k": "kilo", "": "", "m": "milli", "n": "nano", "p": "pico",
}  # fmt: skip
UNITS = {
    "m": "meter", "g": "gram", "s": "second", "W": "watt", "J": "joule", "Pa": "pascal", "Hz": "hertz", "V": "volt",
    "A": "ampere", "N": "newton", "F": "farad", "T": "tesla", "H": "henry", "L": "liter", "S": "siemens",
    "C": "coulomb",
}  # fmt: skip
OWN = str.split("t h min day GB Gb MB Mb cal ft mi lb oz mol K °C °F mph ha")
NOUNS = str.split("""
    apple student marble ticket box book car train tree house window door dog cat bird fish horse chicken cow sheep
    egg cookie cake pizza slice coin stamp card pencil pen page chapter letter word friend team player game match
    goal point way path triangle circle vertex edge side divisor factor solution integer subset permutation teacher
    worker customer bag basket bottle cup glass plate chair table room floor step row column seat flower rose tomato
    potato orange banana
""")
PLURALS = {
    "box": "boxes", "fish": "fish", "sheep": "sheep", "vertex": "vertices", "glass": "glasses", "match": "matches",
    "tomato": "tomatoes", "potato": "potatoes",
}  # fmt: skip
CHANGING = str.split("""
    half halves third thirds quarter quarters fifth fifths sixths sevenths eighths ninths tenths elevenths twelfths
    twentieths hundredths thousandths pair pairs couple couples dozen dozens score scores gross hundred thousands
    million billions trio quartets kilo mega giga milli micro double doubled triple tripled squared cubed halved
    negative minus plus imaginary complex binary octal hexadecimal factorial root log percent ppm mod times fold
    million more less fewer not or maybe wrong approximately Hälfte Drittel Viertel Dutzend Paar tiers demi doble
    mitad tercios половина треть пара 半 倍 対 双
""")


def _number(rng: random.Random) -> str:
    return rng.choice(
        [str(rng.randint(2, 999)), f"{rng.randint(1, 99)}.{rng.randint(1, 9)}", rf"\frac{{{rng.randint(1, 9)}}}{{11}}"]
    )


def _dressed(rng: random.Random, number: str, unit: str) -> str:
    """The number with a unit or noun in one of the ways in which people write it."""
    forms = [
        rf"{number}\text{{ {unit}}}",
        rf"{number} \mathrm{{{unit}}}",
        rf"{number}\,\text{{{unit}}}",
        rf"{number}~\textrm{{ {unit}.}}",
    ]
    return rng.choice(forms)


def _any_case(rng: random.Random, name: str) -> str:
    return rng.choice([name, name.capitalize(), name.upper(), name + "s" if name not in ("hertz", "siemens") else name])


def symbols_and_names(rng: random.Random) -> Pair:
    prefix, unit = rng.choice(list(PREFIXES)), rng.choice(list(UNITS))
    number, symbol = _number(rng), prefix + unit
    if symbol == "pm":
        return symbols_and_names(rng)
    name = _any_case(rng, PREFIXES[prefix] + UNITS[unit]) if unit != "H" else PREFIXES[prefix] + UNITS[unit]
    sides = [_dressed(rng, number, symbol), _dressed(rng, number, rng.choice([symbol, name]))]
    rng.shuffle(sides)
    return sides[0], sides[1], 1


def another_unit(rng: random.Random) -> Pair:
    known = [
        p + u for p in PREFIXES for u in UNITS if p + u not in ("pm", "F", "C")
    ] + OWN  # °C and °F are written so, too
    one, other = rng.sample(known, 2)
    number = _number(rng)
    return _dressed(rng, number, one), _dressed(rng, number, other), 0


def another_case(rng: random.Random) -> Pair:
    known = {p + u for p in PREFIXES for u in UNITS} | set(OWN)
    twins = [(a, b) for a in sorted(known) for b in sorted(known) if a != b and a.casefold() == b.casefold()]
    one, other = rng.choice([*twins, ("T", "t"), ("H", "h"), ("t", "T"), ("h", "H"), ("MHz", "mhz"), ("mPa", "MPA")])
    number = _number(rng)
    return _dressed(rng, number, one), _dressed(rng, number, other), 0


def products(rng: random.Random) -> Pair:
    factors = [
        (unit, rng.choice([1, 1, 2, 3]))
        for unit in rng.sample(["kg", "m", "A", "K", "mol", "J", "V"], rng.randint(1, 3))
    ]
    below = rng.choice(["s", "h", "day"])
    right = rng.random() < 0.5

    def write(parts: list[tuple[str, int]]) -> str:
        dot = rng.choice([" ", "·", r" \cdot "])
        above = dot.join(unit + (f"^{power}" if power > 1 else "") for unit, power in rng.sample(parts, len(parts)))
        return above + rng.choice(["/", " per "]) + below

    other = list(factors)
    if not right:
        at = rng.randrange(len(other))
        other[at] = (other[at][0], other[at][1] + 1)
    number = _number(rng)
    return rf"{number}\text{{ {write(factors)}}}", rf"{number}\text{{ {write(other)}}}", int(right)


def counted_noun(rng: random.Random) -> Pair:
    noun, number = rng.choice(NOUNS), _number(rng)
    spelling = rng.choice([noun, PLURALS.get(noun, noun + "s"), PLURALS.get(noun, noun + "s").capitalize()])
    dressed = _dressed(rng, number, spelling)
    gold = rng.choice([number, rf"{number}\text{{ {PLURALS.get(noun, noun + 's')}}}"])
    return gold, dressed, 1


def another_noun(rng: random.Random) -> Pair:
    (one, other), number = rng.sample(NOUNS, 2), _number(rng)
    return _dressed(rng, number, one), _dressed(rng, number, PLURALS.get(other, other + "s")), 0


def changing_word(rng: random.Random) -> Pair:
    number = str(rng.randint(2, 999))
    return number, _dressed(rng, number, rng.choice(CHANGING)), 0


def other_number(rng: random.Random) -> Pair:
    noun, number = rng.choice([*NOUNS, *OWN]), rng.randint(2, 999)
    gold = rng.choice([str(number), rf"{number}\text{{ {noun}}}"])
    return gold, _dressed(rng, str(number + rng.choice([-1, 1, 10])), noun), 0


GENERATORS: list[Callable[[random.Random], Pair]] = [
    symbols_and_names, another_unit, another_case, products, counted_noun, another_noun, changing_word, other_number,
]  # fmt: skip


def misjudged(reward: MathReward, seed: int, count: int) -> list[Pair]:
    rng = random.Random(seed)
    pairs = [GENERATORS[i % len(GENERATORS)](rng) for i in range(count)]
    scores = reward([rf"\boxed{{{answer}}}" for _, answer, _ in pairs], [gold for gold, _, _ in pairs], {})
    return [pair for pair, score in zip(pairs, scores, strict=True) if score.value != pair[2]]


def test_drawn_units_and_nouns_are_judged_as_a_person_would(reward: MathReward) -> None:
    assert misjudged(reward, 0, 400) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_thousands_of_drawn_units_and_nouns_are_judged_as_a_person_would(reward: MathReward, seed: int) -> None:
    assert misjudged(reward, seed, 3000) == []
