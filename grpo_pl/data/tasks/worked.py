"""Worked solutions of reasoning-gym's tasks for demonstrations, as far as an entry's metadata tell them."""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

Metadata = Mapping[str, Any]
FACTORED = 1000
"""Numbers up to this one are written as products of primes."""
IN_ONE_LINE = 999
"""Numbers up to this one are divided in one line."""
_OPERATORS: Mapping[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.floordiv),
}
_TERM = re.compile(r"(?P<sign>[+-]?)(?:(?P<number>\d+)(?:\*(?P<times>[a-z]))?|(?P<alone>[a-z]))")


def worked(task: str, metadata: Metadata) -> str:
    """The steps to the answer of an entry, a line each; empty where none are known."""
    if "answer_cot" in metadata:  # gsm_symbolic
        return str(metadata["answer_cot"]).rsplit("####", 1)[0]
    if "states" in metadata:  # of string_manipulation, string_splitting, string_synthesis
        states = (state if isinstance(state, str) else " ".join(map(str, state)) for state in metadata["states"])
        return "".join(f"{state}\n" for state in states)
    known = _WORK.get(task)
    return "" if known is None else "".join(f"{line}\n" for line in known(metadata))


def running_totals(expression: str) -> list[str]:
    """One line a term after the first: ``4 + 3 - 9`` to ``4+3=7``, ``7-9=-2``; with decimals where there are any."""
    first, *rest = re.findall(r"[+-]?\d+(?:\.\d+)?", expression.replace(" ", ""))
    total, lines = Decimal(first), []
    for term in rest:
        lines.append(f"{total}{term}={total + Decimal(term)}")
        total += Decimal(term)
    return lines


def reduced(expression: str) -> list[str]:
    """One line an operation, inner ones first: ``7 * (2 + 3)`` to ``2+3=5``, ``7*5=35``. Nothing where a division
    leaves a rest."""
    lines: list[str] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
            raise ValueError("neither a number nor an operation")
        left, right = value(node.left), value(node.right)
        sign, operation = _OPERATORS[type(node.op)]
        if sign == "/" and (right == 0 or left % right):
            raise ValueError("a division that leaves a rest")
        result = int(operation(left, right))
        lines.append(f"{left}{sign}{right}={result}")
        return result

    try:
        value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError):
        return []
    return lines


def long_product(expression: str) -> list[str]:
    """Two factors, digit after digit of the second from its end, each time with what the digit before carried: ``43 *
    32`` to ``43*2=86``, of which 6 is a digit of the product and 8 is carried, ``43*3=129``, then 129 + 8 in columns as
    ``9+8=17``, ``12+1=13``: 13, 7, 6. Of small factors the lines recur; a sign is left to the answer."""
    factors = [int(number) for number in re.findall(r"\d+", expression)]
    if len(factors) != 2:
        return []
    first, second = factors
    lines, carried = list[str](), 0
    for digit in map(int, reversed(str(second))):
        part = first * digit
        lines += [f"{first}*{digit}={part}", *in_columns(part, carried)]
        carried = (part + carried) // 10
    return lines


def in_columns(first: int, second: int) -> list[str]:
    """A sum, a line for each digit of the second number and one for the last carry: 129 + 8 to ``9+8=17``, ``12+1=13``;
    nothing where there is nothing to add."""
    lines, carry = list[str](), 0
    while second:
        total = first % 10 + second % 10 + carry
        lines.append(f"{first % 10}+{second % 10}{'+1' if carry else ''}={total}")
        first, second, carry = first // 10, second // 10, total // 10
    return [*lines, f"{first}+1={first + 1}"] if carry else lines


def euclid(numbers: list[int]) -> list[str]:
    """Euclid's algorithm, number after number: ``12, 9`` to ``12-1*9=3``, ``9-3*3=0``."""
    lines, found = [], numbers[0]
    for number in numbers[1:]:
        found, rest = max(found, number), min(found, number)
        while rest:
            lines.append(f"{found}-{found // rest}*{rest}={found % rest}")
            found, rest = rest, found % rest
    return lines


def common_factors(numbers: Sequence[int]) -> list[str]:
    """Each number as the product of its primes, then the primes that all have in common: ``12, 18`` to ``12=2*2*3``,
    ``18=2*3*3``, ``2*3=6``; ``1=1`` where there are none. All lines but the last follow from one number alone, so they
    are learned sooner than the subtractions of Euclid's algorithm, which numbers beyond 1,000 take.
    """
    if max(numbers) > FACTORED:
        return euclid(list(numbers))
    common = math.gcd(*numbers)
    return [*(f"{number}={_product(_primes(number))}" for number in numbers), f"{_product(_primes(common))}={common}"]


def _product(primes: Sequence[int]) -> str:
    return "*".join(map(str, primes or [1]))


def _primes(number: int) -> list[int]:
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


def common_multiple(numbers: Sequence[int]) -> list[str]:
    """What the two have in common as in `common_factors`, the smaller number divided by it, and that times the larger:
    ``4, 6`` to ``4=2*2``, ``6=2*3``, ``2=2``, ``4/2=2``, ``6*2=12``. Nothing for more than two numbers."""
    if len(numbers) != 2:
        return []
    common = math.gcd(*numbers)
    smaller, larger = sorted(numbers)
    rest = [] if common == 1 else [f"{smaller}/{common}={smaller // common}"]
    return [*common_factors(numbers), *rest, *long_product(f"{larger} * {smaller // common}")]


def divided_out(numerator: int, denominator: int) -> list[str]:
    """Euclid's algorithm, then both divided by what is common."""
    common = math.gcd(numerator, denominator)
    both = (f"{number}/{common}={number // common}" for number in (numerator, denominator))
    return [*euclid([numerator, denominator]), *both]


def factored(factors: Sequence[int]) -> list[str]:
    """Divided by one factor after the other: 2, 3, 7 to ``42/2=21``, ``21/3=7``."""
    rest, lines = math.prod(factors), []
    for factor in factors[:-1]:
        lines.append(f"{rest}/{factor}={rest // factor}")
        rest //= factor
    return lines


def rebased(digits: str, source: int, target: int) -> list[str]:
    """The number built up digit after digit, then divided down: ``132`` from base 4 to 6 as ``1*4+3=7``,
    ``7*4+2=30``, ``30=5*6+0``, ``5=0*6+5``."""
    values = [int(digit, 36) for digit in digits] or [0]
    number, lines = values[0], []
    for value in values[1:]:
        lines.append(f"{number}*{source}+{value}={number * source + value}")
        number = number * source + value
    while number:
        lines.append(f"{number}={number // target}*{target}+{number % target}")
        number //= target
    return lines


def halving(number: int) -> list[str]:
    """The number halved until nothing is left, each time with the 1 bits counted so far: 5 to ``5:1``, ``2:1``,
    ``1:2``."""
    lines, count = [], 0
    while number:
        count += number % 2
        lines.append(f"{number}:{count}")
        number //= 2
    return lines


def isolated(equation: str) -> list[str]:
    """The unknown by itself, one operation a line: ``2*e + 3 = 13`` to ``13-3=10``, ``10/2=5``; beyond 999 by a long
    division: ``56 - 98*e = -1218`` to ``-1218-56=-1274``, ``127-1*98=29``, ``294-3*98=0``. Nothing where the equation
    does not say what it is."""
    left, right = (_linear(side) for side in equation.replace(" ", "").split("="))
    if left is None or right is None:
        return []
    factor, constant = left[0] - right[0], right[1] - left[1]
    if factor == 0 or constant % factor:
        return []
    lines = [f"{right[1]}{-left[1]:+d}={constant}"] if left[1] else []
    lines += [f"{left[0]}{-right[0]:+d}={factor}"] if right[0] else []
    if abs(constant) <= IN_ONE_LINE:
        return [*lines, f"{constant}/{factor}={constant // factor}"]
    return [*lines, *_divided(abs(constant), abs(factor))]


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
    lines, rest = list[str](), 0
    for digit in str(number):
        rest = 10 * rest + int(digit)
        if rest >= divisor or lines:
            lines.append(f"{rest}-{rest // divisor}*{divisor}={rest % divisor}")
            rest %= divisor
    return lines


# --- words, letters and lists ---------------------------------------------------------------------------------------


def deciphered(rotation: int, cipher: str, clear: str) -> list[str]:
    """The rotation, then every letter with the one that it stands for, a word a line: ``IFZ NF`` to ``1``, ``IHFEZY``,
    ``NMFE``."""
    words = zip(cipher.split(), clear.split(), strict=True)
    return [str(rotation), *("".join(map("".join, zip(*pair, strict=True))) for pair in words)]


def counted(text: str, letter: str) -> str:
    """The text with a count behind every such letter: ``noon`` and ``o`` to ``no1o2n``."""
    numbers = itertools.count(1)
    return "".join(f"{each}{next(numbers)}" if each.lower() == letter.lower() else each for each in text)


def inserted(items: Sequence[str], goal: Sequence[str]) -> list[str]:
    """The list sorted so far, a line for every item: 3, 1, 2 to ``3``, ``1 3``, ``1 2 3``."""
    rank = {item: place for place, item in enumerate(goal)}
    return [" ".join(sorted(items[:count], key=rank.__getitem__)) for count in range(1, len(items) + 1)]


def compared(numbers: Sequence[str], bound: str) -> list[str]:
    """Each number beside the bound: ``6.4>5.1``."""
    limit = Decimal(bound)
    signs = ("<" if Decimal(number) < limit else ">" if Decimal(number) > limit else "=" for number in numbers)
    return [f"{number}{sign}{bound}" for number, sign in zip(numbers, signs, strict=True)]


def needed(note: str, magazine: str) -> list[str]:
    """Each letter of the note, how often it is needed and how often it is there: ``t2/1``."""
    return [f"{letter}{note.count(letter)}/{magazine.count(letter)}" for letter in dict.fromkeys(note)]


def legs(animals: Mapping[str, int]) -> list[str]:
    """Legs of each kind and of all so far: two birds and an ant as ``2*2=4, 4``, ``1*6=6, 10``."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS  # type: ignore[import-untyped]

    total, lines = 0, []
    for animal, count in animals.items():
        total += count * ANIMALS[animal]
        lines.append(f"{count}*{ANIMALS[animal]}={count * ANIMALS[animal]}, {total}")
    return lines


_WORK: dict[str, Callable[[Metadata], list[str]]] = {
    "base_conversion": lambda entry: rebased(entry["source_repr"], entry["source_base"], entry["target_base"]),
    "basic_arithmetic": lambda entry: reduced(entry["expression"]),
    "caesar_cipher": lambda entry: deciphered(entry["rotation"], entry["cipher_text"], entry["clear_text"]),
    "chain_sum": lambda entry: running_totals(entry["expression"]),
    "count_bits": lambda entry: halving(entry["number"]),
    "decimal_chain_sum": lambda entry: running_totals(entry["expression"]),
    "fraction_simplification": lambda entry: divided_out(entry["numerator"], entry["denominator"]),
    "gcd": lambda entry: common_factors(entry["numbers"]),
    "isomorphic_strings": lambda entry: [" ".join(map("".join, zip(*entry["words"], strict=False)))],  # oe dg dg
    "lcm": lambda entry: common_multiple(entry["numbers"]),
    "leg_counting": lambda entry: legs(entry["animals"]),
    "letter_counting": lambda entry: [counted(" ".join(entry["span"]), entry["target_letter"])],
    "number_filtering": lambda entry: compared(entry["original_numbers"], entry["filter_value"]),
    "number_sorting": lambda entry: inserted(entry["original_numbers"], entry["sorted_numbers"]),
    "prime_factorization": lambda entry: factored(entry["factors"]),
    "products": lambda entry: long_product(entry["expression"]),
    "ransom_note": lambda entry: needed(entry["ransom_note"], entry["magazine"]),
    "simple_equations": lambda entry: isolated(entry["equation"]),
    "spell_backward": lambda entry: [f"{letter}{n}" for n, letter in enumerate(entry["word"], 1)],  # s1, u2, n3
    "word_sequence_reversal": lambda entry: [f"{n} {word}" for n, word in enumerate(entry["words"], 1)],
    "word_sorting": lambda entry: inserted(entry["transformed_words"], entry["sorted_words"]),
}
"""Name of a task -> the lines of its work."""
