r"""Pairs of answers whose values are known to differ, class by class, in every spelling: none may be paid.

Each class draws a value and another one near it (numbers swapped, a product kept, one number changed), both as data,
and writes them down; that they differ is known from the data, never from a verifier.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

SEED = 60
Value = Any
Spelling = Callable[[Value], str]

_UNITS = [
    ("hours", "h", "minutes", "min", 60), ("feet", "ft", "inches", "in", 12), ("pounds", "lb", "ounces", "oz", 16),
    ("days", "days", "hours", "h", 24), ("weeks", "wk", "days", "days", 7), ("meters", "m", "centimeters", "cm", 100),
]  # fmt: skip


def _quantity(rng: random.Random) -> Value:
    units = rng.choice(_UNITS)
    return rng.randint(1, 30), rng.randint(1, units[4] - 1), units


def _other_quantity(value: Value, rng: random.Random) -> Value:
    first, second, units = value
    factors = [n for n in range(1, units[4]) if first * second % n == 0]
    second_of_product = rng.choice(factors)
    others = [
        (second, first, units) if first < units[4] else value,
        (first * second // second_of_product, second_of_product, units),
        (first + 1, second, units),
        (first, second % (units[4] - 1) + 1, units),
        (first, second, rng.choice(_UNITS)),
    ]
    return rng.choice([other for other in others if other != value])


_QUANTITIES: list[Spelling] = [
    lambda v: rf"{v[0]}\text{{ {v[2][0]} }}{v[1]}\text{{ {v[2][2]}}}",
    lambda v: rf"{v[0]}\text{{ {v[2][1]} }}{v[1]}\text{{ {v[2][3]}}}",
    lambda v: f"{v[0]} {v[2][0]} {v[1]} {v[2][2]}",
    lambda v: f"{v[0]} {v[2][1]} {v[1]} {v[2][3]}",
    lambda v: rf"{v[0]}\text{{ {v[2][0]} and }}{v[1]}\text{{ {v[2][2]}}}",
    lambda v: f"{v[0]} {v[2][0]} and {v[1]} {v[2][2]}",
    lambda v: rf"{v[0]}\text{{ {v[2][0]}, }}{v[1]}\text{{ {v[2][2]}}}",
    lambda v: rf"{v[0]}\,\mathrm{{{v[2][1]}}}\ {v[1]}\,\mathrm{{{v[2][3]}}}",
]


def _row(rng: random.Random) -> Value:
    return tuple(rng.randint(1, 40) for _ in range(rng.randint(2, 5)))


def _other_row(value: Value, rng: random.Random) -> Value:
    at = rng.randrange(len(value))
    others = [
        value[::-1],
        tuple(rng.sample(value, len(value))),
        (*value[:at], value[at] + 1, *value[at + 1 :]),
        (math.prod(value),),
        (int("".join(map(str, value))),),
        (sum(value),),
        value[:-1],
        (*value, value[0]),
    ]
    return rng.choice([other for other in others if other != value])


_ROWS: list[Spelling] = [
    lambda v: " ".join(map(str, v)),
    lambda v: r"\ ".join(map(str, v)),
    lambda v: r"\quad ".join(map(str, v)),
    lambda v: "(" + r"\ ".join(map(str, v)) + ")" if len(v) > 1 else str(v[0]),
    lambda v: r"\left(" + r"\; ".join(map(str, v)) + r"\right)" if len(v) > 1 else str(v[0]),
    lambda v: f"({', '.join(map(str, v))})" if len(v) > 1 else str(v[0]),
]


def _table(rng: random.Random) -> Value:
    points = rng.sample(range(-3, 12), rng.randint(2, 3))
    return rng.choice("fghPT"), tuple(sorted((point, rng.randint(-9, 20)) for point in points))


def _other_table(value: Value, rng: random.Random) -> Value:
    name, entries = value
    points, results = zip(*entries, strict=True)
    shuffled = tuple(sorted(zip(points, rng.sample(results, len(results)), strict=True)))
    others = [
        (name, shuffled),
        (name, tuple(sorted(zip(points, results[::-1], strict=True)))),
        (rng.choice("fghPT"), entries),
        (name, (*entries[:-1], (points[-1], results[-1] + 1))),
        (name, (*entries[:-1], (points[-1] + 1, results[-1]))),
        (name, tuple(sorted((result, point) for point, result in entries))),
        (name, entries[:-1]),
    ]
    return rng.choice([other for other in others if other != value])


_TABLES: list[Spelling] = [
    lambda v: ", ".join(f"{v[0]}({p})={r}" for p, r in v[1]),
    lambda v: ", ".join(f"{v[0]}({p})={r}" for p, r in v[1][::-1]),
    lambda v: r"\text{ and }".join(f"{v[0]}({p}) = {r}" for p, r in v[1]),
    lambda v: r",\quad ".join(f"{v[0]}({p})={r}" for p, r in v[1]),
    lambda v: r"\begin{cases}" + r"\\".join(f"{v[0]}({p})={r}" for p, r in v[1]) + r"\end{cases}",
    lambda v: r"\begin{aligned}" + r"\\[2pt]".join(f"{v[0]}({p})&={r}" for p, r in v[1]) + r"\end{aligned}",
]

_AT = {"a": 5.0, "b": 3.0, "x": 7.0, "y": 2.0}


def _logarithm(rng: random.Random) -> Value:
    pair = rng.sample(range(2, 30), 2) if rng.random() < 0.5 else rng.sample("abxy", 2)
    return rng.choice(["quotient", "product", "base", "power"]), *pair


def _size(value: Value) -> float:
    kind, one, other = value
    a, b = (_AT.get(side, side) for side in (one, other))
    return {
        "quotient": math.log(a / b), "product": math.log(a * b), "base": math.log(a) / math.log(b),
        "power": 3 * math.log(a) + math.log(b),
    }[kind]  # fmt: skip


def _other_logarithm(value: Value, rng: random.Random) -> Value:
    kind, one, other = value
    while True:
        found = rng.choice([(kind, other, one), (rng.choice(["quotient", "product", "base", "power"]), one, other)])
        found = rng.choice([found, _logarithm(rng)])
        same_letters = {type(side) for side in found[1:]} == {type(side) for side in value[1:]}
        if same_letters and abs(_size(found) - _size(value)) > 1e-3:
            return found


_LOGARITHMS: list[Spelling] = [
    lambda v: {
        "quotient": r"\ln\frac{%s}{%s}", "product": r"\ln(%s\cdot %s)", "base": r"\frac{\ln %s}{\ln %s}",
        "power": r"3\ln %s+\ln %s",
    }[v[0]] % v[1:],
    lambda v: {
        "quotient": r"\ln %s-\ln %s", "product": r"\ln %s+\ln %s", "base": r"\frac{\lg %s}{\lg %s}",
        "power": r"\ln(%s^3)+\ln %s",
    }[v[0]] % v[1:],
    lambda v: {
        "quotient": r"\log_e %s-\log_e %s", "product": r"\log_e %s+\log_e %s", "power": r"\ln(%s^3\cdot %s)",
    }.get(v[0], rf"\log_{{{v[2]}}} %s+0\cdot %s") % v[1:],
]  # fmt: skip


def _system(rng: random.Random) -> Value:
    return tuple(rng.randint(-9, 20) for _ in range(rng.randint(2, 3)))


def _other_system(value: Value, rng: random.Random) -> Value:
    at = rng.randrange(len(value))
    others = [
        value[::-1],
        tuple(rng.sample(value, len(value))),
        (*value[:at], value[at] + 1, *value[at + 1 :]),
        (*value[:at], -value[at], *value[at + 1 :]),
    ]
    different = [other for other in others if other != value]
    return rng.choice(different or [(value[0] + 1, *value[1:])])


def _rows_of(value: Value, sign: str = "=") -> list[str]:
    return [f"{name}{sign}{number}" for name, number in zip("xyz", value, strict=False)]


_SYSTEMS: list[Spelling] = [
    lambda v: ", ".join(_rows_of(v)),
    lambda v: ", ".join(_rows_of(v)[::-1]),
    lambda v: r"\text{ and }".join(_rows_of(v)),
    lambda v: rf"({','.join('xyz'[: len(v)])})=({','.join(map(str, v))})",
    lambda v: rf"({', '.join(map(str, v))})",
    lambda v: r"\begin{cases}" + r"\\".join(_rows_of(v)) + r"\end{cases}",
    lambda v: r"\begin{cases}" + r",\\[4pt] ".join(_rows_of(v)[::-1]) + r".\end{cases}",
    lambda v: r"\begin{aligned}" + r"\\".join(_rows_of(v, "&=")) + r"\end{aligned}",
    lambda v: r"\left\{\begin{array}{l}" + r"\\".join(_rows_of(v)) + r"\end{array}\right.",
]

CLASSES: dict[str, tuple[Callable[[random.Random], Value], Callable[[Value, random.Random], Value], list[Spelling]]] = {
    "quantities": (_quantity, _other_quantity, _QUANTITIES),
    "spaced lists": (_row, _other_row, _ROWS),
    "function values": (_table, _other_table, _TABLES),
    "logarithms": (_logarithm, _other_logarithm, _LOGARITHMS),
    "systems": (_system, _other_system, _SYSTEMS),
}


def pairs(name: str, count: int, *, equal: bool = False) -> Iterator[tuple[str, str]]:
    """``count`` pairs (gold answer, answer) of a class, each spelling with each other in turn; with ``equal`` of the
    same value."""
    draw, other, spellings = CLASSES[name]
    rng = random.Random(f"{SEED}: {name}")
    ways: Sequence[tuple[Spelling, Spelling]] = list(product(spellings, repeat=2))
    for number in range(count):
        value = draw(rng)
        gold, answer = ways[number % len(ways)]
        yield gold(value), answer(value if equal else other(value, rng))
