"""Splits an assertion into a question for the program and the expected value, which the program never sees.

``assert f(2) == 4`` asks for ``f(2)`` and expects that it ``== 4``. Only the first half is sent to the process of the
program; the second is evaluated here, by a small evaluator that knows literals, comparisons, arithmetic and a few
functions of Python, and can neither call nor look up anything else. What is done to a call before it is compared is
part of the question: of ``sorted(f(2), reverse=True)[0] == 4`` the program is asked for all but the ``== 4``, so that
values of any kind are listed and sorted where they are at home.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import datetime
import math
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any

from grpo_pl.extras.code.values import INCOMPARABLE, MOST_KEYS, MOST_PLACES, short_range


def _some(kind: Callable[..., Any]) -> Callable[..., Any]:
    """``set`` or another class of not too many members: those that collide make it slow."""

    def make(members: Any = (), *further: Any, **named: Any) -> Any:
        members = members if hasattr(members, "__len__") else list(members)
        if len(members) > MOST_KEYS:
            raise ValueError(f"more than {MOST_KEYS} members")
        return kind(members, *further, **named)

    return make


def _exact(kind: Callable[..., Any]) -> Callable[..., Any]:
    """``Fraction`` or ``Decimal`` of what is not too long when it is written out: 1e999999999 would never end."""

    def make(*parts: Any) -> Any:
        for part in parts:
            if isinstance(part, str) and abs(Decimal(part.partition("/")[0]).adjusted()) > MOST_PLACES:
                raise ValueError(f"more than {MOST_PLACES} digits")
        return kind(*parts)

    return make


PURE: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, complex, float, int, len, list, max, min, sorted, str, tuple)},
    "round": lambda number, places=None: round(number, None if places is None else max(-400, min(400, places))),
    "sum": lambda numbers: sum(numbers),  # of lists, from a second argument on, it would be slow
    "range": lambda *bounds: short_range(bounds),
    **{kind.__name__: _some(kind) for kind in (bytes, dict, set, frozenset, Counter, OrderedDict)},
    **{kind.__name__: _exact(kind) for kind in (Fraction, Decimal)},
    **{kind.__name__: kind for kind in (deque, datetime.date, datetime.datetime, datetime.timedelta)},
    **dict.fromkeys(("isclose", "math.isclose"), math.isclose),
    **{f"math.{name}": getattr(math, name) for name in ("fabs", "sqrt", "isnan", "isinf")},
    "cmath.isclose": cmath.isclose,
}
"""Functions that are evaluated here, of what the tests hold or the program gave back."""
MODULES = ("collections", "fractions", "decimal", "datetime")
"""Modules that may stand before the names of these."""
ASKED = frozenset(
    {"abs", "all", "any", "bool", "bytearray", "bytes", "complex", "dict", "enumerate", "filter", "float", "frozenset"}
    | {"int", "iter", "len", "list", "map", "max", "min", "next", "ord", "repr", "reversed", "round", "set", "sorted"}
    | {"str", "sum", "tuple", "zip", "Counter", "Decimal", "Fraction", "OrderedDict", "deque"}
)
"""Functions that the program calls itself of a value that is asked of it: there it may be of any kind."""
LARGEST = 100_000
"""Most members of what ``*`` and ``+`` make of sequences."""
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_SIGNS: Mapping[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Not: operator.not_}
NUMBERS = (int, float, complex, Fraction, Decimal)
Evaluate = Callable[[Sequence[Any]], Any]
"""The value of an expression in which the values of the program stand for its calls."""


class BadTests(ValueError):
    """A text that holds no tests, or a test whose expectation cannot be told from its question."""


def take_apart(test: ast.expr, held: frozenset[str] = frozenset()) -> tuple[list[str], Callable[[Sequence[Any]], bool]]:
    """The questions of an assertion to the program, and whether it holds for the values that the program gives back.

    Args:
        held: names of variables that hold what the program made or changed (see `Variables`).

    Raises:
        BadTests: it holds something else than calls, literals, comparisons, arithmetic and the functions above.
    """
    asked: list[str] = []
    evaluation = _evaluation(test, asked, held)
    if not asked:
        raise BadTests(f"{ast.unparse(test)[:60]!r} asks the program for nothing")

    def holds(values: Sequence[Any]) -> bool:
        try:
            return bool(evaluation(values))
        except INCOMPARABLE:
            return False

    return asked, holds


def _evaluation(node: ast.expr, asked: list[str], held: frozenset[str]) -> Evaluate:
    """How to evaluate ``node``; ``asked`` gets its questions to the program."""

    def each(nodes: Iterable[ast.expr]) -> Callable[[Sequence[Any]], list[Any]]:
        parts = [_evaluation(part, asked, held) for part in nodes]
        return lambda values: [part(values) for part in parts]

    if _is_question(node, held):
        place = len(asked)
        asked.append(ast.unparse(node))
        return lambda values: values[place]
    match node:
        case ast.Constant(value=value):
            return lambda values: value
        case ast.Call(func=function, args=arguments, keywords=keywords):
            known, names = _known(function), [str(k.arg) for k in keywords if k.arg]
            if known is None or len(names) < len(keywords):
                raise BadTests(_why_not(node))
            named, plain = each(k.value for k in keywords), each(arguments)
            return lambda values: known(*plain(values), **dict(zip(names, named(values), strict=True)))
        case ast.Compare(left=left, ops=signs, comparators=others):
            compare = [_COMPARISONS[type(sign)] for sign in signs]
            sides = [_evaluation(side, asked, held) for side in (left, *others)]
            return lambda values: _all_hold(compare, (side(values) for side in sides))
        case ast.BoolOp(op=kind, values=nodes):
            conditions, decisive = [_evaluation(part, asked, held) for part in nodes], isinstance(kind, ast.Or)
            return lambda values: _first_that_is(decisive, (condition(values) for condition in conditions))
        case ast.UnaryOp(op=kind) if type(kind) in _SIGNS:
            sign, operand = _SIGNS[type(kind)], _evaluation(node.operand, asked, held)
            return lambda values: sign(operand(values))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC:
            pair = each([left, right])
            return lambda values: _calculated(type(kind), *pair(values))
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes) | ast.Set(elts=nodes):
            members, make = each(nodes), {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return lambda values: make(members(values))
        case ast.Dict(keys=keys) if None not in keys:
            of_keys, of_values = each(key for key in keys if key is not None), each(node.values)
            return lambda values: dict(zip(of_keys(values), of_values(values), strict=True))
        case ast.Subscript(value=whole) if not isinstance(node.slice, ast.Slice):
            both = each([whole, node.slice])
            return lambda values: operator.getitem(*both(values))
    raise BadTests(f"{ast.unparse(node)[:60]!r} is no call, literal, comparison or arithmetic")


def _first_that_is(truth: bool, values: Iterable[Any]) -> Any:
    """The value of ``a or b`` (with True) or ``a and b``: the first that decides it, else the last."""
    for value in values:
        if bool(value) is truth:
            break
    return value


def _all_hold(compare: Sequence[Callable[[Any, Any], Any]], sides: Iterable[Any]) -> bool:
    """Of a chain such as ``a < b < c``; b and c are evaluated as far as it holds."""
    return all(holds(*pair) for holds, pair in zip(compare, pairwise(sides), strict=True))


class Variables:
    """The variables of tests that hold what the program made or changed: bound to what a call of it returned, or given
    to one. Others, such as ``expected = [1, 2]``, are never asked of it."""

    def __init__(self) -> None:
        self.held: frozenset[str] = frozenset()
        self._of_tests: set[str] = set()
        """Names that the tests define, import or bind to values of their own: calls of these are not the program's."""

    def calls(self, node: ast.AST) -> list[ast.Call]:
        """The calls of the program in a node."""
        calls = (inner for inner in ast.walk(node) if isinstance(inner, ast.Call) and _known(inner.func) is None)
        return [call for call in calls if not _why_not(call) and not _names(call.func) & self._of_tests]

    def follow(self, statement: ast.stmt) -> None:
        """Takes in what a statement of the tests does to them."""
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._of_tests.add(name)
                return
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                self._of_tests.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
                return
            case ast.Assign(targets=targets, value=value):
                bound = frozenset().union(*map(_names, targets))
                if _is_question(value, self.held) and (self.calls(value) or _names(value) & self.held):
                    self.held |= bound
                    self._of_tests -= bound
                else:
                    self.held -= bound
                    if not isinstance(value, ast.Name) or value.id in self._of_tests:  # else a function of the program
                        self._of_tests |= bound
        for call in self.calls(statement):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            self.held |= {argument.id for argument in given if isinstance(argument, ast.Name)}


def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _is_question(node: ast.expr, held: frozenset[str]) -> bool:
    """True if the program may be asked for all of ``node``: a call of it or a variable that it made or changed, and
    what is done to that alone."""
    match node:
        case ast.Name(id=name):
            return name in held
        case ast.Attribute(value=inner) | ast.Starred(value=inner):
            return _is_question(inner, held)
        case ast.Subscript(value=inner, slice=place):
            return _is_question(inner, held) and not any(isinstance(n, ast.Call | ast.Name) for n in ast.walk(place))
        case ast.List(elts=[inner]) | ast.Tuple(elts=[inner]) | ast.Set(elts=[inner]) if isinstance(inner, ast.Starred):
            return _is_question(inner, held)
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner], keywords=[]):
            return _is_question(inner, held)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in ASKED:
            others = [a for a in arguments if not _is_question(a, held)]
            only = len(arguments) - len(others) == 1
            named = all(isinstance(k.value, ast.Constant) or _is_function(k.value) for k in keywords)
            return only and named and all(_is_function(o) or _is_setting(name, o) for o in others)
        case ast.Call():
            return _known(node.func) is None and not _why_not(node)
    return False


def _is_function(node: ast.expr) -> bool:
    """``len``, ``str.lower``, or a lambda that compares nothing: says how, and not what is expected."""
    if isinstance(node, ast.Lambda):
        return not any(isinstance(inner, ast.Compare) for inner in ast.walk(node))
    root = node.value if isinstance(node, ast.Attribute) else node
    return isinstance(root, ast.Name) and hasattr(builtins, root.id)


def _is_setting(function: str, node: ast.expr) -> bool:
    """Digits to round to, a base, a first index; None where there is no next."""
    if function not in ("round", "int", "enumerate", "next") or not isinstance(node, ast.Constant):
        return False
    return node.value is None if function == "next" else type(node.value) is int


def _why_not(call: ast.Call) -> str:
    """Why the program is not asked for a call: it would learn what is expected, or it is no call of it; or ``""``."""
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    shown = f"{ast.unparse(call)[:60]!r}"
    if isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id):
        return f"{shown} would let the program judge itself"
    if not isinstance(root, ast.Name):
        return f"{shown} is no call of a function of the program"
    if any(isinstance(node, ast.Compare | ast.comprehension) for node in ast.walk(call)):
        return f"{shown} compares inside of the call"
    return ""


def _known(function: ast.expr) -> Callable[..., Any] | None:
    match function:
        case ast.Name(id=name):
            return PURE.get(name)
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return PURE.get(name) if module in MODULES else PURE.get(f"{module}.{name}")
    return None


def _calculated(kind: type, left: Any, right: Any) -> Any:
    """Arithmetic whose result stays small.

    Raises:
        ValueError: it would not.
    """
    numbers = isinstance(left, NUMBERS) and isinstance(right, NUMBERS)
    if kind is ast.Pow:
        parts = [left.numerator, left.denominator] if isinstance(left, int | Fraction) else []
        if not numbers or abs(right) > 100 or any(part.bit_length() > 1000 for part in parts):
            raise ValueError("too large a power")
    elif kind is ast.Mod and not numbers:
        raise ValueError("only numbers have a remainder")
    elif kind is ast.Mult and not numbers:
        count, sequence = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(count, int) or count * len(sequence) > LARGEST:
            raise ValueError("too long a sequence")
    return _ARITHMETIC[kind](left, right)
