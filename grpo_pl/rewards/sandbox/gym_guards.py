"""Rejects wrong answers that scorers of reasoning-gym accept in full; the worker loads this file by its path.

Each guard corrects one fault of a scorer. ``tests/rewards/test_gym_constants.py`` searches all tasks for further ones.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_NO_NUMBER = re.compile(r"(?<![A-Za-z])(?:nan|inf|infinity)j?(?![A-Za-z])", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_INTEGER = re.compile(r"\d+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_CONSTANTS = frozenset(
    {"C", "c", "K", "k", "E", "pi", "exp", "log", "ln", "sqrt", "abs", "Abs"}
    | {f"{arc}{name}{h}" for arc in ("", "a") for name in ("sin", "cos", "tan") for h in ("", "h")}
)
"""Names that may occur in an antiderivative besides its variable."""
_ARITHMETIC = re.compile(r"[\d+\-*/()\s]+")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
PANEL = (
    *("0", "1", "2", "5", "10", "100", "0.5", "1/2", "True", "False", "None", "True False", "A", "no", "idk"),
    *("[]", "{}", "[[0]]", "00:00", "0 days", "0 days, 00:00"),
)
"""Constant answers; partial credit counts only if it exceeds what the best of them, or the question itself, earns."""


def objection(task: str, answer: str, entry: dict[str, Any]) -> str:
    """Why an answer is not right, whatever its scorer says; ``""`` if no guard objects."""
    gold = entry["answer"] or ""
    if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(gold):
        return "nan and inf are no answers"  # scorers that compare distances accept them
    if task in _ONE_ANSWER and _parts(answer, gold) > _parts(gold, gold):
        return "more than one answer"  # the scorer reads only the beginning
    guard = _GUARDS.get(task)
    return "" if guard is None else guard(answer, entry)


def calculate(text: str, *, exact: bool = False) -> Any:
    """The value of an expression of numbers and arithmetic or bitwise operators; ``exact`` computes with fractions.

    Raises:
        ValueError: ``text`` holds anything else.
        ZeroDivisionError: it divides by zero.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, exact)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an arithmetic expression") from error


def _value(node: ast.AST, exact: bool) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(node.value) if exact else node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, exact), _value(node.right, exact))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, exact))
    raise ValueError("not an arithmetic expression")


def literal_or_arithmetic(text: Any, *scopes: Any) -> Any:
    """Replaces ``eval`` in the scorers: evaluates literals, and arithmetic with numbers; ignores the scopes.

    Raises:
        ValueError: ``text`` is neither.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError):
        return calculate(text)


def _parts(text: str, gold: str) -> int:
    """How many numbers a text names, or words where the gold answer has no numbers."""
    return len(_NUMBER.findall(text.replace(",", "")) if _NUMBER.search(gold) else re.findall(r"\S+", text))


def _coin_flip(answer: str, entry: dict[str, Any]) -> str:
    """The scorer accepts a prefix of the right digits, so that 0 is right for every 0.…, and tolerates an error of
    1e-4, so that 0 is right for every small probability. Here the error is at most min(1e-4, probability / 100)."""
    try:
        stated, true = Fraction(answer.replace(",", "")), Fraction(entry["answer"])
    except (ValueError, ZeroDivisionError):
        return "not a number"
    return "" if abs(stated - true) <= min(Fraction(1, 10**4), true / 100) else "another probability"


def _halting(answer: str, entry: dict[str, Any]) -> str:
    """The scorer compares ``bool(text)`` of answer and gold answer, which is True for every text that is not empty."""
    return "" if answer.strip().rstrip(".").lower() == str(entry["answer"]).lower() else "not the answer"


def _numbers_used(target: Callable[[dict[str, Any]], int]) -> Callable[[str, dict[str, Any]], str]:
    """The scorers accept other numbers than those given, round the result, and evaluate constants and functions. Here
    each number is used once, with + - * / only, and the result is exactly the target."""

    def guard(answer: str, entry: dict[str, Any]) -> str:
        if not _ARITHMETIC.fullmatch(answer) or "**" in answer or "//" in answer:
            return "not an expression of the numbers with + - * /"
        if sorted(map(int, _INTEGER.findall(answer))) != sorted(entry["metadata"]["numbers"]):
            return "other numbers than those given"
        try:
            reached = calculate(answer, exact=True)
        except (ValueError, ZeroDivisionError):
            return "has no value"
        return "" if reached == target(entry) else "another result"

    return guard


def _conclusion(answer: str, entry: dict[str, Any]) -> str:
    """The scorer accepts whatever follows from the premises, also a repeated premise or a statement that is nearly
    always true. Here the conclusion is false in more than a quarter of all cases (assignments of the variables)."""
    from reasoning_gym.logic.propositional_logic import Expression  # type: ignore[import-untyped]

    premises, names = entry["metadata"]["premises"], sorted(entry["metadata"]["variables"])
    if "".join(answer.split()) in {"".join(premise.split()) for premise in premises}:
        return "a premise repeated"
    if len(names) > 12:
        return "too many variables"
    try:
        conclusion = Expression.from_string(answer)
        cases = [{name: bool(case >> i & 1) for i, name in enumerate(names)} for case in range(2 ** len(names))]
        excluded = sum(not conclusion.evaluate(case) for case in cases)
    except (ValueError, KeyError, AttributeError, IndexError, RecursionError):
        return "not a statement about the variables"
    return "" if 4 * excluded > len(cases) else "excludes no more than a quarter of all cases"


def _antiderivative(answer: str, entry: dict[str, Any]) -> str:
    """The scorer differentiates the answer and takes every other variable for a constant."""
    unknown = set(_NAME.findall(answer)) - _CONSTANTS - {entry["metadata"]["variable"]}
    return f"names {min(unknown)}, which is not in the question" if unknown else ""


_ONE_ANSWER = frozenset(
    {"advanced_geometry", "fraction_simplification", "gsm_symbolic", "letter_jumble", "spell_backward"}
    | {"time_intervals", "word_sorting"}
)
_GUARDS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "coin_flip": _coin_flip,
    "countdown": _numbers_used(lambda entry: int(entry["metadata"]["target"])),
    "game_of_life_halting": _halting,
    "intermediate_integration": _antiderivative,
    "propositional_logic": _conclusion,
    "puzzle24": _numbers_used(lambda entry: 24),
    "simple_integration": _antiderivative,
}
