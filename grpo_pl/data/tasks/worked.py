"""Work behind the answers of reasoning-gym's tasks, written out for demonstrations where an entry tells enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Metadata = Mapping[str, Any]
_TERM = re.compile(r"(?P<sign>[+-]?)(?:(?P<number>\d+)(?:\*(?P<times>[a-z]))?|(?P<alone>[a-z]))")


def worked(task: str, metadata: Metadata) -> str:
    """The steps to the answer of an entry, a line each; empty where none are known."""
    if "answer_cot" in metadata:  # gsm_symbolic
        return str(metadata["answer_cot"]).rsplit("####", 1)[0]
    known = _WORK.get(task)
    return "" if known is None else "".join(f"{line}\n" for line in known(metadata))


def running_totals(expression: str) -> list[str]:
    """One line a term after the first: ``4 + 3 - 9`` to ``4+3=7``, ``7-9=-2``."""
    first, *rest = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    total, lines = int(first), []
    for term in rest:
        lines.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return lines


def euclid(numbers: list[int]) -> list[str]:
    """Euclid's algorithm, number after number: ``12, 9`` to ``12-1*9=3``, ``9-3*3=0``."""
    lines = []
    found = numbers[0]
    for number in numbers[1:]:
        a, b = max(found, number), min(found, number)
        while b:
            lines.append(f"{a}-{a // b}*{b}={a % b}")
            a, b = b, a % b
        found = a
    return lines


def halving(number: int) -> list[str]:
    """The number halved until nothing is left, each time with the 1 bits counted so far: 5 to ``5:1``, ``2:1``,
    ``1:2``."""
    lines: list[str] = []
    count = 0
    while number:
        count += number % 2
        lines.append(f"{number}:{count}")
        number //= 2
    return lines


def isolated(equation: str) -> list[str]:
    """The unknown by itself, then a long division: ``56 - 98*e = -1218`` to ``98*e=1274``, ``127-1*98=29``,
    ``294-3*98=0``. Nothing where the equation does not say what it is."""
    left, right = (_linear(side) for side in equation.replace(" ", "").split("="))
    if left is None or right is None:
        return []
    factor, constant = left[0] - right[0], right[1] - left[1]
    if factor == 0 or constant % factor:
        return []
    if factor < 0:
        factor, constant = -factor, -constant
    variable = next(c for c in equation if c.isalpha())
    return [f"{factor}*{variable}={constant}", *_divided(abs(constant), factor)]


def _linear(side: str) -> tuple[int, int] | None:
    """Factor of the unknown and constant of a sum; None for another expression."""
    factor = constant = end = 0
    for term in _TERM.finditer(side):
        if term.start() != end:
            return None
        end = term.end()
        sign = -1 if term["sign"] == "-" else 1
        if term["times"] or term["alone"]:
            factor += sign * int(term["number"] or 1)
        else:
            constant += sign * int(term["number"])
    return (factor, constant) if end == len(side) and side else None


def _divided(number: int, divisor: int) -> list[str]:
    """Long division, a line for each digit of the quotient."""
    rest = 0
    lines: list[str] = []
    for digit in str(number):
        rest = 10 * rest + int(digit)
        if rest >= divisor or lines:
            lines.append(f"{rest}-{rest // divisor}*{divisor}={rest % divisor}")
            rest %= divisor
    return lines


_WORK: dict[str, Callable[[Metadata], list[str]]] = {
    "chain_sum": lambda metadata: running_totals(metadata["expression"]),
    "count_bits": lambda metadata: halving(metadata["number"]),
    "gcd": lambda metadata: euclid(metadata["numbers"]),
    "simple_equations": lambda metadata: isolated(metadata["equation"]),
}
"""Name of a task -> the lines of its work."""
