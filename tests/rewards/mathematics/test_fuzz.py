"""Random pairs of gold answer and answer whose verdict is known, a family for each class of answers.

A family is a function of ``FAMILIES`` that draws one pair; add a class by adding a function.
"""

# ruff: noqa: E501

import random
from collections.abc import Callable

import pytest

from grpo_pl.rewards import MathReward

Pair = tuple[str, str, bool]
"""Gold answer, answer, and whether it is right."""

LETTERS = "abcfghkmnpqrstuvwxyz"
FORMULAS = [
    ("{a}-{b}", "-{b}+{a}"), (r"\frac{{{a}}}{{{b}+{a}}}", r"\frac{{{a}}}{{{a}+{b}}}"), (r"\pi {a}^2", r"{a}^2\pi"),
    (r"\sqrt{{{a}^2+{b}^2}}", r"\sqrt{{{b}^2+{a}^2}}"), ("{a}_1+{b}_2", "{b}_2+{a}_1"), (r"\{{{a}, {b}\}}", r"\{{{b}, {a}\}}"),
    ("({a}, {b})", "({a},{b})"), ("{a}>{b}+1", "{b}+1<{a}"), ("{n}{a}{b}^2", r"{n}\cdot {b}^2 {a}"), ("{a}, {b}, {n}", "{n}, {b}, {a}"),
    (r"\frac{{{n}}}{{{a}-{b}}}", r"-\frac{{{n}}}{{{b}-{a}}}"), ("{a}^{{{b}}}+{n}", "{n}+{a}^{{{b}}}"), (r"\vec{{{a}}}+{b}", r"{b}+\vec{{{a}}}"),
    (r"\begin{{pmatrix}}{a}&{b}\end{{pmatrix}}", r"\begin{{bmatrix}}{a} & {b}\end{{bmatrix}}"), (r"\sin {a}+{b}", r"{b}+\sin {a}"),
    ("{n}({a}+{b})", "{n}{a}+{n}{b}"), ("{a}!+{b}", "{b}+{a}!"), (r"{b}+\Delta {a}", r"\Delta {a}+{b}"), ("y={n}{a}+{b}", "{n}{a}+{b}"),
]  # fmt: skip
"""Formulas of two letters and a number, each with another form of the same value."""


def case(rng: random.Random) -> Pair:
    """Letters of another case are other letters."""
    a, b = (letter.upper() if rng.random() < 0.5 else letter for letter in rng.sample(LETTERS, 2))
    if rng.random() < 0.2:
        b = a.swapcase()
    gold, same = rng.choice(FORMULAS)
    n, right = rng.randint(2, 9), rng.random() < 0.5
    answer = same.format(a=a if right else a.swapcase(), b=b, n=n)
    return gold.format(a=a, b=b, n=n), answer, right


def primes(rng: random.Random) -> Pair:
    """The number of primes belongs to a name."""
    f, x, n = rng.choice("fghuvy"), rng.choice("xts"), rng.randint(2, 9)
    marks = rng.choice(["", "'", "''"])
    shape = rng.choice(["{f}({x})+{n}", "{n}{f}({x})", "{f}({n})-{x}", "{f}+{n}{x}", "{x}{f}={n}"])
    gold = shape.format(f=f + marks, x=x, n=n)
    right = rng.random() < 0.4
    if right and marks:
        marks = "^{" + r"\prime" * len(marks) + "}" if rng.random() < 0.5 else marks
    elif not right:
        marks = rng.choice([m for m in ["", "'", "''"] if m != marks])
    return gold, shape.format(f=f + marks, x=x, n=n), right


ITEMS = [
    r"\sqrt{{{n}}}", "{n}", "-{n}", r"\frac{{1}}{{{n}}}", "x+{n}", r"{n}\pi", "({n},x)", "x^{n}", r"\frac{{{n}}}{{x}}",
]  # fmt: skip


def lists(rng: random.Random) -> Pair:
    """Lists without brackets are multisets, with round brackets they keep their order."""
    plain = rng.random() < 0.5
    shapes = ["{n}", "-{n}"] if plain else ITEMS
    numbers = rng.sample([2, 3, 5, 7, 11, 13, 17, 19], 4)
    items = [rng.choice(shapes).format(n=n) for n in numbers[: rng.randint(2, 4)]]
    if rng.random() < 0.4:
        items.append(items[0])
    other = rng.choice(shapes).format(n=23)
    ways = ["shuffled", "shuffled", "tuple", "doubled", "dropped", "changed", "reversed tuple", "one of them"]
    way = rng.choice(ways)
    gold, answer = ", ".join(items), list(items)
    if way == "shuffled":
        rng.shuffle(answer)
    elif way == "doubled":
        answer.append(rng.choice(items))
    elif way == "dropped":
        answer.remove(rng.choice(items))
    elif way == "changed":
        answer[rng.randrange(len(answer))] = other
    elif way == "one of them":
        answer = answer[:1]
    if "tuple" in way and len(set(items)) > 1 and not any("(" in item for item in items):
        turned = "reversed" in way and items[::-1] != items
        return f"({gold})", f"({', '.join(items[::-1] if turned else items)})", not turned
    joint = rng.choice([", ", ",", ", ", r" \text{ and } ", " and "])
    return gold, joint.join(answer), way in ("shuffled", "tuple", "reversed tuple")


def connectives(rng: random.Random) -> Pair:
    """Conditions with "and" and "or", and the sets that they denote."""
    low = rng.randint(-9, 5)
    high = low + rng.randint(1, 9)
    x = rng.choice("xyt")
    below, above = rng.choice([("<", ")"), (r"\le", "]")]), rng.choice([(">", "("), (r"\ge", "[")])
    word = rng.choice([" or ", r" \text{ or } ", r"\text{ or }", r" \lor "])
    outside = f"{x} {below[0]} {low}{word}{x} {above[0]} {high}"
    union = rf"(-\infty, {low}{below[1]} \cup {above[1]}{high}, \infty)"
    turned = f"{x} {above[0]} {high} or {x} {below[0]} {low}"
    wrong = [
        outside.replace("or", "and").replace(r"\land", r"\land "),
        f"{x} {below[0]} {low}",
        f"{x} {below[0]} {low}{word}{x} {above[0]} {high + 1}",
        rf"(-\infty, {low}{')' if below[1] == ']' else ']'} \cup {above[1]}{high}, \infty)",
        f"{'z'} {below[0]} {low} or {'z'} {above[0]} {high}",
        rf"\mathbb{{R}}\setminus\{{{low}\}}",
    ]
    gold = rng.choice([outside, union])
    if gold == union:
        wrong.pop(4)
    right = rng.random() < 0.5
    return gold, rng.choice([outside, union, turned]) if right else rng.choice(wrong), right


NAMES = [
    "x", "x_1", r"\lambda", "f(2)", "f'(2)", "f''(0)", "E[X]", "P(A)", r"\overline{AB}", r"m\angle A", r"\text{Area}", "AB", "y'",
    r"\frac{dy}{dx}", r"\frac{d}{dx}f(x)", "a_{10}", r"|\vec{v}|", r"f^{-1}(3)", r"\sigma", r"\operatorname{Var}(X)", r"\hat p",
]  # fmt: skip


def names(rng: random.Random) -> Pair:
    """A name before the value changes nothing; a number or a formula there does, and so does another value."""
    value, name = rng.choice(["{n}", r"\frac{{{n}}}{{7}}", r"\sqrt{{{n}}}", "{n}t+1", "-{n}"]), rng.choice(NAMES)
    n = rng.choice([2, 3, 5, 11, 13])
    gold, right = value.format(n=n), rng.random() < 0.5
    if right:
        return gold, rng.choice([f"{name}={gold}", f"{name} = {gold}"]), True
    wrong = [f"{name}={value.format(n=n + 4)}", f"{n + 1}={gold}", f"2x+y={gold}", f"{name}={n + 1}={gold}"]
    other = rng.choice([other for other in NAMES if other != name and "frac" not in other and other != "y'"])
    if rng.random() < 0.2 and "x" not in value:
        return f"{name}={gold}", f"{other}={gold}", False
    return gold, rng.choice(wrong), False


# --- units and nouns ---

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
    apple student marble ticket box book car train tree house window door dog cat bird horse chicken cow
    egg cookie cake pizza slice coin stamp card pencil pen page chapter letter word friend team player game match
    goal point way path triangle circle vertex edge side divisor factor solution integer subset permutation teacher
    worker customer bag basket bottle cup glass plate chair table room floor step row column seat flower rose tomato
    potato orange banana
""")
PLURALS = {
    "box": "boxes", "vertex": "vertices", "glass": "glasses", "match": "matches",
    "tomato": "tomatoes", "potato": "potatoes",
}  # fmt: skip
CHANGING = str.split("""
    half halves third thirds quarter quarters fifth fifths sixths sevenths eighths ninths tenths elevenths twelfths
    twentieths hundredths thousandths pair pairs couple couples dozen dozens score scores gross hundred thousands
    million billions trio trios kilo mega giga milli micro double doubled triple tripled squared cubed halved
    negative minus plus imaginary complex binary octal hexadecimal factorial root log percent ppm mod times fold
    million more less fewer not or maybe wrong approximately Hälfte Drittel Viertel Dutzend Paar demi doble
    mitad половина треть пара 半 倍 対 双
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
    return sides[0], sides[1], True


def another_unit(rng: random.Random) -> Pair:
    known = [
        p + u for p in PREFIXES for u in UNITS if p + u not in ("pm", "F", "C")
    ] + OWN  # °C and °F are written so, too
    one, other = rng.sample(known, 2)
    number = _number(rng)
    return _dressed(rng, number, one), _dressed(rng, number, other), False


def another_case(rng: random.Random) -> Pair:
    known = {p + u for p in PREFIXES for u in UNITS} | set(OWN)
    twins = [(a, b) for a in sorted(known) for b in sorted(known) if a != b and a.casefold() == b.casefold()]
    one, other = rng.choice([*twins, ("T", "t"), ("H", "h"), ("t", "T"), ("h", "H"), ("MHz", "mhz"), ("mPa", "MPA")])
    number = _number(rng)
    return _dressed(rng, number, one), _dressed(rng, number, other), False


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
    return rf"{number}\text{{ {write(factors)}}}", rf"{number}\text{{ {write(other)}}}", right


def counted_noun(rng: random.Random) -> Pair:
    noun, number = rng.choice(NOUNS), _number(rng)
    plural = PLURALS.get(noun, noun + "s")
    spelling = rng.choice([plural, plural.capitalize()])
    dressed = _dressed(rng, number, spelling)
    gold = rng.choice([number, rf"{number}\text{{ {plural}}}"])
    return gold, dressed, True


def another_noun(rng: random.Random) -> Pair:
    (one, other), number = rng.sample(NOUNS, 2), _number(rng)
    return _dressed(rng, number, one), _dressed(rng, number, PLURALS.get(other, other + "s")), False


def changing_word(rng: random.Random) -> Pair:
    number = str(rng.randint(2, 999))
    return number, _dressed(rng, number, rng.choice(CHANGING)), False


def other_number(rng: random.Random) -> Pair:
    noun, number = rng.choice([*NOUNS, *OWN]), rng.randint(2, 999)
    gold = rng.choice([str(number), rf"{number}\text{{ {noun}}}"])
    return gold, _dressed(rng, str(number + rng.choice([-1, 1, 10])), noun), False


FAMILIES: list[Callable[[random.Random], Pair]] = [
    case, primes, lists, connectives, names, symbols_and_names, another_unit, another_case, products, counted_noun,
    another_noun, changing_word, other_number,
]  # fmt: skip


@pytest.mark.parametrize("count", [12, pytest.param(600, marks=pytest.mark.slow)])
def test_random_pairs_get_their_verdict(reward: MathReward, count: int) -> None:
    drawn = [(family, random.Random(f"{family.__name__} {count}")) for family in FAMILIES]
    pairs = [(family.__name__, *family(rng)) for family, rng in drawn for _ in range(count)]
    scores = reward([f"so \\boxed{{{answer}}}." for _, _, answer, _ in pairs], [gold for _, gold, _, _ in pairs], {})
    assert [(*p, score.status) for p, score in zip(pairs, scores, strict=True) if score.value != float(p[3])] == []
