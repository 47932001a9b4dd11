"""Rejects wrong answers that scorers of reasoning-gym accept in full.

Each guard corrects one fault of a scorer. ``tests/rewards/test_gym_answers.py`` searches all tasks for further ones.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
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
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
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
    if task in _FORMS and not _FORMS[task].fullmatch(answer.strip()):
        return "text beside the answer"  # the scorer passes over it
    guard = _GUARDS.get(task)
    return "" if guard is None else guard(answer, entry)


def enough(task: str, answer: str) -> Iterator[str]:
    """Parts of an answer that must not be right by themselves: what it consists of if it is the same words, or the same
    characters, two or more times; and of moves all but the last ones."""
    if task in _MOVES:
        moves = _MOVES[task].findall(answer)
        yield from (" ".join(moves[:count]) for count in range(1, min(len(moves), MOST_MOVES)))
    for pieces, glue in ((re.findall(r"[^\s,;|]+", answer), " "), (list("".join(answer.split())), "")):
        for length in range(1, len(pieces) // 2 + 1):
            if len(pieces) % length == 0 and pieces == pieces[:length] * (len(pieces) // length):
                yield glue.join(pieces[:length])


MOST_MOVES = 100
"""Most moves that are checked one after another."""


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
    """Count of numbers in a text, or of words where the gold answer has no numbers."""
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


def _statement(answer: str, entry: dict[str, Any]) -> str:
    """The scorer takes any word for a name and forgets those without a role: ``It is not true that Ann is a knave``."""
    words, right = ([w for w in re.findall(r"\w+", t.lower()) if w not in _FILLERS] for t in (answer, entry["answer"]))
    plain = re.fullmatch(r"[A-Za-z\s.,()]*", answer) is not None
    return "" if plain and len(words) == len(right) else "text beside the answer"


def _spelled(answer: str, entry: dict[str, Any]) -> str:
    """The scorer adds up what each letter is worth, which may come to 1.0000000000000002 for the first letters."""
    return "text beside the answer" if len(answer.strip()) > len(entry["answer"]) else ""


def _gsm(answer: str, entry: dict[str, Any]) -> str:
    """The scorer takes the digits of the first number that it finds, without the sign."""
    return "" if Fraction(answer.strip().removeprefix("$")) == Fraction(entry["answer"]) else "another number"


def _colours(answer: str, entry: dict[str, Any]) -> str:
    """The scorer looks up the vertices of the puzzle and passes over all else."""
    puzzle = entry["metadata"]["puzzle"]
    try:
        colours = json.loads(answer)
    except (ValueError, RecursionError):
        return "no JSON"
    named = isinstance(colours, dict) and len(colours) == answer.count(":")  # a key given twice is there once
    return "" if named and sorted(colours) == sorted(map(str, puzzle["vertices"])) else "other vertices"


def _boxes(answer: str, entry: dict[str, Any]) -> str:
    """The scorer passes over agents and moves that do not exist."""
    try:
        rounds = json.loads(answer)
        orders = [order for one in rounds for order in one.items()]
    except (ValueError, RecursionError, TypeError, AttributeError):
        return "no list of orders in JSON"
    if all(_AGENT.fullmatch(key) and isinstance(move, str) and _MOVE.fullmatch(move) for key, move in orders):
        return ""
    return "no order to an agent"


_MOVES = {"rubiks_cube": re.compile(r"\S+"), "rush_hour": re.compile(r"[A-Z][+-]\d+"), "sokoban": re.compile(r"[LURD]")}
"""Task -> a move; its scorer looks at the end alone, also where the puzzle was solved long before."""
_FILLERS = frozenset({"is", "a", "an", "and"})
_AGENT = re.compile(r"Agent\[\d+(?:\.\d*)?, ?\d+(?:\.\d*)?\]")
_MOVE = re.compile(r"move\(box_\w+, (?:target_\w+|square\[\d+(?:\.\d*)?, ?\d+(?:\.\d*)?\])\)")
_REAL = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_FORMS: dict[str, re.Pattern[str]] = {
    task: re.compile(pattern, re.ASCII)
    for task, pattern in {
        "fraction_simplification": (
            r"\$*\s*(?:\\[dt]?frac\s*\{\s*-?\d+\s*\}\s*\{\s*-?\d+\s*\}|-?\d+\s*/\s*-?\d+|-?\d+)\s*\$*"
        ),
        "gsm_symbolic": r"\$?-?\d+(?:\.\d+)?",
        "kakurasu": r"[01]+(?:\s+[01]+)*",
        "polynomial_equations": rf"{_REAL}(?:\s*,\s*{_REAL})*",
        "pool_matrix": rf"{_REAL}(?:\s+{_REAL})*",
        "quantum_lock": r"[A-Ca-c](?:(?:[\s,]|→|->)+[A-Ca-c])*|[A-Ca-c]+",
        "rubiks_cube": r"\d*[A-Za-z]w?'?\d*(?:\s+\d*[A-Za-z]w?'?\d*)*",
        "rush_hour": r"[A-Z][+-]\d+(?:[\s,]+[A-Z][+-]\d+)*",
        "sokoban": r"[LURD]+(?:[\s,]+[LURD]+)*",
        "time_intervals": r"\d+ days?|(?:\d+ days?, *)?\d+:\d+(?::\d+(?:\.\d+)?)?",
        "survo": r"-?\d+(?:\s+-?\d+)*",
        "tower_of_hanoi": r"Move disk \d+ from Peg \d+ to Peg \d+(?:[ \t]*\n\s*Move disk \d+ from Peg \d+ to Peg \d+)*",
    }.items()
}
"""Task -> all that an answer may hold. These scorers pick what they look for out of any text."""
_ONE_ANSWER = frozenset(
    {"advanced_geometry", "cryptarithm", "fraction_simplification", "gsm_symbolic", "letter_jumble"}
    | {"polynomial_equations", "spell_backward", "time_intervals", "word_sorting"}
)
_GUARDS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "boxnet": _boxes,
    "coin_flip": _coin_flip,
    "countdown": _numbers_used(lambda entry: int(entry["metadata"]["target"])),
    "game_of_life_halting": _halting,
    "graph_color": _colours,
    "gsm_symbolic": _gsm,
    "intermediate_integration": _antiderivative,
    "knights_knaves": _statement,
    "propositional_logic": _conclusion,
    "puzzle24": _numbers_used(lambda entry: 24),
    "simple_integration": _antiderivative,
    "spell_backward": _spelled,
}
