"""Takes an assertion apart: what the program is asked for, and what is expected of it, which the program never sees.

``assert f(2) == 4`` asks for ``f(2)`` and expects that it ``== 4``. Only the first half is sent to the process of the
program; the second is evaluated here, by a small evaluator that knows literals, comparisons, arithmetic and a few
functions of Python, and can neither call nor look up anything else.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_pl.rewards.programs.values import MOST_KEYS


def _some(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``set`` or ``frozenset`` of not too many members: those that collide make it slow."""

    def make(members: Any = ()) -> Any:
        if len(members) > MOST_KEYS:
            raise ValueError(f"more than {MOST_KEYS} members")
        return kind(members)

    return make


PURE: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("abs", "all", "any", "bool", "float", "int", "len", "list", "max")},
    **{name: getattr(builtins, name) for name in ("min", "round", "sorted", "str", "tuple")},
    "set": _some(set),
    "frozenset": _some(frozenset),
    "sum": lambda numbers: sum(numbers),  # of lists, from a second argument on, it would be slow
}
"""Functions that are evaluated here, of what the program gave back."""
MATHS: Mapping[str, Callable[..., Any]] = {"isclose": math.isclose, "fabs": math.fabs, "sqrt": math.sqrt}
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


class Inseparable(ValueError):
    """An assertion whose expectation cannot be told from its question."""


@dataclass(frozen=True)
class Assertion:
    """One assertion: ``asked[k]`` is evaluated by the program, and ``test`` refers to its value by the name ``.k``."""

    asked: tuple[str, ...]
    test: ast.expr

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether it is true of what the program gave back."""
        try:
            return bool(_value(self.test, values))
        except (ArithmeticError, TypeError, ValueError, LookupError, RecursionError, MemoryError):
            return False


def take_apart(test: ast.expr) -> Assertion:
    """An assertion of its expression.

    Raises:
        Inseparable: it holds something else than calls, literals, comparisons, arithmetic and the functions above.
    """
    asked: list[str] = []
    rest = _without_calls(test, asked)
    if not asked:
        raise Inseparable(f"{ast.unparse(test)[:60]!r} asks the program for nothing")
    return Assertion(tuple(asked), rest)


def _without_calls(node: ast.expr, asked: list[str]) -> ast.expr:
    """``node`` with every call of the program replaced by the name of its value; ``asked`` gets the calls."""

    def inner(child: ast.expr) -> ast.expr:
        return _without_calls(child, asked)

    match node:
        case ast.Constant():
            return node
        case ast.Call() if _known(node.func) is not None and not node.keywords:
            return ast.Call(node.func, [inner(a) for a in node.args], [])
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="isclose")):
            keywords = [ast.keyword(k.arg, inner(k.value)) for k in node.keywords]
            return ast.Call(node.func, [inner(a) for a in node.args], keywords)
        case ast.Call():
            _check_call(node)
            asked.append(ast.unparse(node))
            return ast.Name(f".{len(asked) - 1}", ast.Load())
        case ast.Compare():
            return ast.Compare(inner(node.left), node.ops, [inner(c) for c in node.comparators])
        case ast.BoolOp():
            return ast.BoolOp(node.op, [inner(v) for v in node.values])
        case ast.UnaryOp() if type(node.op) in _SIGNS:
            return ast.UnaryOp(node.op, inner(node.operand))
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return ast.BinOp(inner(node.left), node.op, inner(node.right))
        case ast.List() | ast.Tuple() | ast.Set():
            return type(node)([inner(e) for e in node.elts])
        case ast.Dict() if None not in node.keys:
            return ast.Dict([inner(key) for key in node.keys if key is not None], [inner(v) for v in node.values])
        case ast.Subscript() if not isinstance(node.slice, ast.Slice):
            return ast.Subscript(inner(node.value), inner(node.slice))
    raise Inseparable(f"{ast.unparse(node)[:60]!r} is no call, literal, comparison or arithmetic")


def _check_call(call: ast.Call) -> None:
    """Refuses calls that would tell the program what is expected, or that are no calls of it.

    Raises:
        Inseparable: see above.
    """
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
        root = root.func if isinstance(root, ast.Call) else root.value
    if isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id):
        raise Inseparable(f"{ast.unparse(call)[:60]!r} would let the program judge itself")
    if not isinstance(root, ast.Name):
        raise Inseparable(f"{ast.unparse(call)[:60]!r} is no call of a function of the program")
    if any(isinstance(node, ast.Compare | ast.comprehension) for node in ast.walk(call)):
        raise Inseparable(f"{ast.unparse(call)[:60]!r} compares inside of the call")


def _known(function: ast.expr) -> Callable[..., Any] | None:
    match function:
        case ast.Name(id=name):
            return PURE.get(name)
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return MATHS.get(name)
    return None


def _value(node: ast.expr, values: Sequence[Any]) -> Any:
    """The value of an expression in which the values of the program stand for its calls."""

    def inner(child: ast.expr) -> Any:
        return _value(child, values)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[int(name[1:])]
        case ast.Call(func=function, args=arguments, keywords=keywords):
            known = _known(function)
            assert known is not None
            return known(*map(inner, arguments), **{str(k.arg): inner(k.value) for k in keywords})
        case ast.Compare(left=left, ops=signs, comparators=others):
            first = inner(left)
            for sign, other in zip(signs, others, strict=True):
                second = inner(other)
                if not _COMPARISONS[type(sign)](first, second):
                    return False
                first = second
            return True
        case ast.BoolOp(op=kind, values=parts):
            return all(map(inner, parts)) if isinstance(kind, ast.And) else any(map(inner, parts))
        case ast.UnaryOp(op=kind, operand=operand):
            return _SIGNS[type(kind)](inner(operand))
        case ast.BinOp(left=left, op=kind, right=right):
            return _calculated(type(kind), inner(left), inner(right))
        case ast.List(elts=parts):
            return list(map(inner, parts))
        case ast.Tuple(elts=parts):
            return tuple(map(inner, parts))
        case ast.Set(elts=parts):
            return set(map(inner, parts))
        case ast.Dict(keys=keys, values=parts):
            return {inner(key): inner(part) for key, part in zip(keys, parts, strict=True) if key is not None}
        case ast.Subscript(value=whole, slice=place):
            return inner(whole)[inner(place)]
    raise AssertionError(f"unreachable: {ast.dump(node)[:100]} was refused when it was read")


def _calculated(kind: type, left: Any, right: Any) -> Any:
    """Arithmetic whose result stays small.

    Raises:
        ValueError: it would not.
    """
    if kind is ast.Pow:
        if not (isinstance(left, int | float) and isinstance(right, int | float) and abs(right) <= 100):
            raise ValueError("too large a power")
        if isinstance(left, int) and left.bit_length() > 1000:
            raise ValueError("too large a power")
    elif kind in (ast.Mult, ast.Mod, ast.Add):
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if kind is ast.Mod and not numbers:
            raise ValueError("only numbers have a remainder")
        if kind is ast.Mult and not numbers:
            count, sequence = (left, right) if isinstance(left, int) else (right, left)
            if not isinstance(count, int) or count * len(sequence) > LARGEST:
                raise ValueError("too long a sequence")
    return _ARITHMETIC[kind](left, right)
