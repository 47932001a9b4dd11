"""``CountdownReward``: does an expression reach the target, with every given number used exactly once?"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from grpo_pl.rewards.base import Score
from grpo_pl.rewards.number_puzzle import NumberPuzzleReward, listed

_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")
_BRACKETS = str.maketrans("[]{}", "()()")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(kw_only=True)
class CountdownReward(NumberPuzzleReward):
    r"""1 if the answer is an expression of the given numbers, each used exactly once, that equals the target; else 0.

    The answer is read after the thoughts: the content of the last ``\boxed{…}``, else of the last ``<answer>``. It may
    hold whole numbers, ``+ - * /`` and brackets, ``07`` being 7, their signs in LaTeX (``\times``, ``\cdot``, ``\div``,
    ``\frac{a}{b}``), and at its end ``=`` and the target; nothing else. It is evaluated exactly, in fractions. The
    target is the gold answer, the numbers are the column ``numbers``. An answer of more than 200 characters is
    ``too_long``.
    """

    trusted: ClassVar[bool] = True
    name: str = "countdown"
    """Key of this reward in metrics, tables and files."""

    def judge(self, answer: str, target: int, given: Sequence[int]) -> Score:
        read = evaluate(answer)
        if read is None:
            return Score(0.0, "wrong", "no expression of whole numbers")
        value, used = read
        if sorted(used) != sorted(given):
            return Score(0.0, "wrong", f"uses {listed(used)} of {listed(given)}")
        if value != target:
            return Score(0.0, "wrong", f"{value} instead of {target}"[:80])
        return Score(1.0, "ok", str(value)[:80])


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and its numbers from left to right; None if it is none, or divides by 0."""
    plain = text.translate(_BRACKETS)
    if not plain.isascii() or set(plain) - set("0123456789+-*/() "):
        return None
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", plain.strip()), mode="eval").body
        return _value(tree), list(_numbers(tree))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # all from what the policy wrote
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result: Fraction = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError(f"not part of an expression: {ast.dump(node)}")


def _numbers(node: ast.expr) -> Iterator[int]:
    if isinstance(node, ast.BinOp):
        yield from _numbers(node.left)
        yield from _numbers(node.right)
    elif isinstance(node, ast.Constant):
        yield int(node.value)  # type: ignore[arg-type]
