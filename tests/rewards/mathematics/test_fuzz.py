"""Random pairs of gold answer and completion whose verdict is known, a family for each class of answers.

A family is a function of ``FAMILIES`` that draws one pair; add a class by adding a function.
"""

# ruff: noqa: E501

import random
from collections.abc import Callable

import pytest

from grpo_pl.rewards import MathReward

Pair = tuple[str, str, bool]
"""Gold answer, completion, and whether it is right."""

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
    return gold.format(a=a, b=b, n=n), boxed(answer), right


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
    return gold, boxed(shape.format(f=f + marks, x=x, n=n)), right


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
        return f"({gold})", boxed(f"({', '.join(items[::-1] if turned else items)})"), not turned
    joint = rng.choice([", ", ",", ", ", r" \text{ and } ", " and "])
    return gold, boxed(joint.join(answer)), way in ("shuffled", "tuple", "reversed tuple")


def ordered_lists(rng: random.Random) -> Pair:
    """A pair of numbers in brackets, the second of which may stand first."""
    a, b = rng.sample(range(2, 30), 2)
    opening, closing = rng.choice(["()", "[]"])
    right = rng.random() < 0.3
    answer = f"{opening}{a},{b}{closing}" if right else f"{opening}{b},{a}{closing}"
    return f"{opening}{a}, {b}{closing}", boxed(answer), right


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
    return gold, boxed(rng.choice([outside, union, turned]) if right else rng.choice(wrong)), right


def inside(rng: random.Random) -> Pair:
    """Conditions joined by "and" are the interval between them; other numbers and ends are not."""
    low = rng.randint(-9, 5)
    high = low + rng.randint(1, 9)
    left, right_end = rng.choice([(">", "<"), (r"\ge", r"\le"), (r"\ge", "<")])
    first = "<" if left == ">" else r"\le"
    chain = f"{low} {first} x {right_end} {high}"
    both = rf"x {left} {low} \text{{ and }} x {right_end} {high}"
    wrong = [both.replace("and", "or"), f"x {left} {low}", rf"x {left} {low - 1} \text{{ and }} x {right_end} {high}"]
    right = rng.random() < 0.4
    return rng.choice([chain, both]), boxed(rng.choice([chain, both]) if right else rng.choice(wrong)), right


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
        return gold, boxed(rng.choice([f"{name}={gold}", f"{name} = {gold}"])), True
    wrong = [f"{name}={value.format(n=n + 4)}", f"{n + 1}={gold}", f"2x+y={gold}", f"{name}={n + 1}={gold}"]
    other = rng.choice([other for other in NAMES if other != name and "frac" not in other and other != "y'"])
    if rng.random() < 0.2 and "x" not in value:
        return f"{name}={gold}", boxed(f"{other}={gold}"), False
    return gold, boxed(rng.choice(wrong)), False


FONTS = [r"\boldsymbol{N}", r"\textcolor{blue}{N}", r"{\bf N}", r"\mathbf{N}", r"\textbf{N}"]


def typography(rng: random.Random) -> Pair:
    """Fonts, colours and other ways of writing change nothing; another number inside them does."""
    n = rng.choice([2, 3, 5, 7, 10, 13])
    ways = [
        (str(n), [font.replace("N", str(n)) for font in FONTS]),
        (rf"\sqrt{{{n}}}", [f"√{n}", rf"\sqrt {{{n}}}", rf"\bm{{\sqrt{{{n}}}}}"]),
        (rf"\frac{{{n}}}{{9}}", [rf"{{{n}\over 9}}", rf"\dfrac{{{n}}}{{9}}", rf"{n}/9"]),
        (rf"x\le {n}", [f"x⩽{n}", rf"x\leqslant {n}", f"x ≤ {n}"]),
        (rf"\frac{{{n}}}{{9}}", [rf"0.\overline{{{n % 10}}}"] if n < 9 else [rf"\frac {{{n}}}{{9}}"]),
    ]
    gold, same = rng.choice(ways)
    answer, right = rng.choice(same), rng.random() < 0.5
    digit = str(n % 10) if "overline" in answer else str(n)
    return gold, boxed(answer if right else answer.replace(digit, "8" if digit != "8" else "6", 1)), right


def boxes(rng: random.Random) -> Pair:
    """Neighbouring boxes are one list; with other words between them the last one counts."""
    numbers = [str(n) for n in rng.sample(range(2, 99), rng.randint(2, 3))]
    joint = rng.choice([", ", " and ", " or ", r" \quad \text{and} \quad ", "$, $", r"\), \(", ", and "])
    completion = joint.join(rf"\boxed{{{n}}}" for n in numbers)
    if rng.random() < 0.3:
        no = rng.choice([". No: ", ", which is wrong. It is ", " is not right, but "])
        return numbers[-1], no.join(completion.split(joint, 1)), len(numbers) == 2
    gold = list(numbers)
    rng.shuffle(gold)
    right = rng.random() < 0.5
    if right:
        return ", ".join(gold), completion, True
    return rng.choice([numbers[-1], ", ".join([*gold[1:], "100"]), ", ".join([*gold, "100"])]), completion, False


def boxed(answer: str) -> str:
    return f"so \\boxed{{{answer}}}."


FAMILIES: list[Callable[[random.Random], Pair]] = [
    case, primes, lists, ordered_lists, connectives, inside, names, typography, boxes,
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_random_pairs_get_their_verdict(
    reward: MathReward, family: Callable[[random.Random], Pair], count: int
) -> None:
    rng = random.Random(f"{family.__name__} {count}")
    pairs = [family(rng) for _ in range(count)]
    scores = reward([completion for _, completion, _ in pairs], [gold for gold, _, _ in pairs], {})
    bad = [(*pair, score.status) for pair, score in zip(pairs, scores, strict=True) if score.value != float(pair[2])]
    assert bad == []
