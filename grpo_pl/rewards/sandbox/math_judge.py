"""Decides whether two answers are mathematically the same; runs only in the sandbox worker, where it may hang or die.

``judge`` puts rules on top of math-verify, which accepts ``6=5`` as 5, takes all tiny numbers for equal, and compares a
lone symbol by its name. SymPy objects are never turned into text here, because ``str`` of one may never return.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import symbols
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.logic import And as LazyAnd
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import grader, verify
from math_verify.parser import get_last_eq
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from sympy.core.relational import Relational  # type: ignore[import-untyped]
from sympy.functions.combinatorial import factorials  # type: ignore[import-untyped]

_SWIFT_BITS = 10**7
"""Size in bits up to which gmpy2 computes a binomial in negligible time."""


def _let_binomials_be_interrupted() -> None:
    """Makes SymPy compute large binomials in Python, where the soft limit can interrupt them. By default it calls
    gmpy2, during which no signal is handled, so that each large binomial would cost a worker."""
    gmpy = getattr(factorials, "_gmpy", None)
    if gmpy is None:
        return

    def bincoef(n: int, k: int) -> Any:
        if k * n.bit_length() <= _SWIFT_BITS:
            return gmpy.bincoef(n, k)
        result = 1
        for i in range(1, k + 1):
            result = result * (n - k + i) // i
        return result

    factorials._gmpy = SimpleNamespace(fac=gmpy.fac, bincoef=bincoef)


def _same_symbols(gold: Any, answer: Any) -> bool:
    """True if two expressions, of which one or both are symbols, have the same names. math-verify's own function takes
    ``X_1`` for ``x_1`` and ``E`` for ``e``; like it, this one takes a product of letters for a word."""

    def name(expr: Any) -> str | None:
        parts = expr.args if isinstance(expr, sympy.Mul) else [expr]
        return "".join(part.name for part in parts) if all(isinstance(part, sympy.Symbol) for part in parts) else None

    return gold == answer or (name(gold) is not None and name(gold) == name(answer))


grader.sympy_compare_symbols = _same_symbols
for _constant in ("gamma", "Gamma"):  # letters like all others, not Euler's constant
    symbols.sympy_singleton_map.pop(_constant, None)

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_NAME = (
    r"(?<![A-Za-z\\])(?P<name>[A-Za-z]|\\[A-Za-z]+(?:\{[A-Za-z]+\})?)\s*(?:_(?:\{(?P<index>\w+)\}|(?P<digit>\w)))?\s*"
)
_PRIMED = re.compile(_NAME + r"(?:(?P<marks>'+)|\^\s*\{?(?P<primes>(?:\s*\\prime)+)\s*\}?)")
_DERIVED = re.compile(_NAME + r"\^\s*\{\s*\((?P<order>\w+)\)\s*\}(?=\s*\()")
_INVERSE = re.compile(r"(?<![A-Za-z\\])(?P<name>[f-hF-H])\s*\^\s*\{\s*-\s*1\s*\}(?=\s*\()")
_LETTER = re.compile(r"(?<![A-Za-z\\])(?:I(?![A-Za-z])|[eE](?=_))|\\(?P<gamma>gamma|Gamma(?!\s*\())(?![A-Za-z])")


def _with_plain_names(text: str) -> str:
    r"""``text`` with names that the library would read as something else written with a subscript or as a word: it
    drops the prime of ``f'``, takes ``f^{-1}(x)`` for a power, and ``I`` and ``\gamma`` for constants."""

    def subscripted(match: re.Match[str]) -> str:
        groups = match.groupdict()
        marks = "prime" * (len(groups.get("marks") or "") or (groups.get("primes") or "").count("\\"))
        index = groups.get("index") or groups.get("digit") or ""
        order = f"order{groups['order']}" if groups.get("order") else ""
        return f"{match['name']}_{{{index}{marks}{order or ('' if marks else 'inverse')}}}"

    for pattern in (_PRIMED, _DERIVED, _INVERSE):
        text = pattern.sub(subscripted, text)
    return _LETTER.sub(lambda letter: rf"\text{{{letter['gamma'] or letter[0]}}}", text)


def _with_imaginary_unit(expr: Any) -> Any:
    r"""``expr`` with the free symbol ``i`` as the imaginary unit, and others complex. In the library ``i`` is a symbol
    that is real in ``0.5+0.5i`` and not in ``\frac{1+i}{2}``."""
    if not (isinstance(expr, sympy.Basic) and any(symbol.name == "i" for symbol in expr.free_symbols)):
        return expr
    complex_ones = expr.subs({symbol: sympy.Symbol(symbol.name) for symbol in expr.free_symbols})
    return complex_ones.subs(sympy.Symbol("i"), sympy.I)  # after z has become complex, else z = i is false at once


@lru_cache(maxsize=64)
def read(text: str, *, last_side: bool = False) -> Any:
    """The SymPy object that the inside of a box denotes, or ``None``; with ``last_side``, the last side of a chain of
    equations that cannot be read as a whole."""
    text = normalize_latex(_with_plain_names(text), _NORMALIZATION)
    for part in dict.fromkeys([text, get_last_eq(text)] if last_side else [text]):
        try:
            expr = latex2sympy(
                part,
                is_real=not grader.should_treat_as_complex(part),
                normalization_config=None,
                conversion_config=_CONVERSION,
            )
            return _with_imaginary_unit(expr)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # the parser raises a plain Exception for what it cannot read, the conversion all kinds
            continue
    return None


_TAME = (sympy.Add, sympy.Mul, sympy.Number, sympy.Symbol, sympy.NumberSymbol, type(sympy.I), sympy.log)


def _is_tame(expr: Any) -> bool:
    """True for sums, products, logarithms and small powers of numbers and symbols, which are evaluated quickly."""
    if isinstance(expr, sympy.Pow):
        exponent = expr.exp
        return bool(exponent.is_Rational and abs(exponent) <= 64 and _is_tame(expr.base))
    return isinstance(expr, _TAME) and all(map(_is_tame, expr.args))


def plainly_different(gold: Any, answer: Any) -> bool:
    """True if both are tame expressions and differ at one test point by more than 10⁻³ · (1 + |gold|).

    This settles most wrong answers without ``simplify``, the slowest part of math-verify.
    """
    if isinstance(gold, sympy.Symbol) or isinstance(answer, sympy.Symbol):
        return False  # a symbol may be a word
    if not (_is_tame(gold) and _is_tame(answer)):
        return False
    symbols = gold.free_symbols | answer.free_symbols
    names = sorted({symbol.name for symbol in symbols})  # x may occur as a real and as a complex symbol
    point = {symbol: sympy.Rational(17 * names.index(symbol.name) + 97, 31) for symbol in symbols}
    g, a = (side.subs(point).evalf(15) for side in (gold, answer))
    if not (g.is_number and a.is_number and g.is_finite and a.is_finite):
        return False
    return bool(abs(complex(g) - complex(a)) > 1e-3 * (1 + abs(complex(g))))


def equal(gold: Any, answer: Any) -> bool:
    """True if math-verify says that both are equal; a lone symbol is also compared with an expression by ``simplify``,
    because math-verify says that 2x/2 is not x."""
    if any(s.name == ANY_INTEGER for side in (gold, answer) for s in getattr(side, "free_symbols", ())):
        return _same_progression(gold, answer)
    if plainly_different(gold, answer):
        return False
    if all(isinstance(side, sympy.Eq) and not side.free_symbols for side in (gold, answer)):
        return bool(gold.lhs == answer.lhs and equal(gold.rhs, answer.rhs))  # f(1)=2, for which all such are alike
    if verify(gold, answer, float_rounding=6, numeric_precision=15, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    if gold.free_symbols != answer.free_symbols:
        return False
    if gold.has(sympy.log) and answer.has(sympy.log):
        return _same_logarithms(gold, answer)
    lone = isinstance(gold, sympy.Symbol) != isinstance(answer, sympy.Symbol)
    return bool(lone and sympy.simplify(gold - answer.doit()) == 0)


ANY_INTEGER = "n_{integer}"
"""Name of the letter that stands for every integer in a general solution."""


def _same_progression(gold: Any, answer: Any) -> bool:
    r"""True if ``a + bn`` takes the same values on both sides, over all integers n: ``\pi - 2\pi n`` and
    ``2\pi n - \pi``."""
    n = sympy.Symbol("n", integer=True)
    sides = []
    for side in (gold, answer):
        value = side.rhs if isinstance(side, sympy.Eq) and isinstance(side.lhs, sympy.Symbol) else side
        if not isinstance(value, sympy.Expr):
            return False
        sides.append(sympy.expand(value.subs({s: n for s in value.free_symbols if s.name == ANY_INTEGER})))
    starts = [side.subs(n, 0) for side in sides]
    steps = [sympy.expand((side - start) / n) for side, start in zip(sides, starts, strict=True)]
    if 0 in steps or any(step.has(n) for step in steps):
        return bool(sympy.simplify(sides[0] - sides[1]) == 0)
    ratio, shift = sympy.simplify(steps[0] / steps[1]), sympy.simplify((starts[0] - starts[1]) / steps[0])
    return ratio in (1, -1) and bool(shift.is_integer)


def _same_logarithms(gold: Any, answer: Any) -> bool:
    r"""True if both are equal wherever their letters are positive, and neither holds an absolute value:
    ``\ln\frac ab`` and ``\ln a-\ln b``."""
    difference = gold - answer
    if difference.has(sympy.Abs):
        return False
    if not difference.free_symbols:
        return bool(abs(difference.evalf(30)) < 1e-20)
    positive = difference.subs({symbol: sympy.Symbol(symbol.name, positive=True) for symbol in difference.free_symbols})
    factored = positive.replace(
        sympy.log, lambda inner, *base: sympy.log(sympy.factor(inner)) / sympy.prod(map(sympy.log, base))
    )
    return bool(sympy.simplify(sympy.expand_log(factored, force=True)) == 0)


def is_undefined(expr: Any) -> bool:
    """True if a SymPy expression contains NaN or complex infinity."""
    return isinstance(expr, sympy.Basic) and expr.has(sympy.nan, sympy.zoo)


_OR = re.compile(r"\\lor(?![a-zA-Z])")
_AND = re.compile(r"\\land(?![a-zA-Z])")
_BUILDER = re.compile(
    r"\\\{(?P<variable>(?:(?!\\mid(?![a-zA-Z]))[^{}|:]|\{[A-Z]\})*+)(?:\\mid|[|:])(?P<condition>.*)\\\}", re.DOTALL
)
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])")
_BRACKETS = re.compile(r"[()\[\]]|\\[{}]")
_SET_SIGN = re.compile(r"\\(?:lor|land|cup|cap|setminus|in|mathbb|infty|ne|le|ge|emptyset|mid)(?![a-zA-Z])|[<>]")


def real_set(text: str) -> tuple[Any, str] | None:
    """``(set of real numbers, name of its variable or "")`` that a condition or a set denotes, or ``None``."""
    text = text.strip()
    if builder := _BUILDER.fullmatch(text):  # {x in R | x > 2}
        found = real_set(builder["condition"])
        domain = real_set(builder["variable"]) if r"\in" in builder["variable"] else (sympy.S.Reals, "")
        return (found[0].intersect(domain[0]), "") if found and domain else None
    for word, join in ((_OR, sympy.Union), (_AND, sympy.Intersection)):
        parts = word.split(text)
        if len(parts) > 1:
            found_parts = [real_set(_without_parentheses(part)) for part in parts]
            names = {part[1] for part in found_parts if part}
            if None in found_parts or len(names - {""}) > 1:
                return None
            return join(*(part[0] for part in found_parts if part)), max(names)
    parts = _split_conditions(text)
    if len(parts) > 1:  # x>0, x\ne1
        both = real_set(r" \land ".join(parts))
        return real_set(r" \lor ".join(parts)) if both is not None and both[0] == sympy.S.EmptySet else both
    expr = read(text)
    if isinstance(expr, sympy.Set):
        return expr.doit(), ""
    symbols_in: set[Any] = getattr(expr, "free_symbols", set())
    if len(symbols_in) != 1 or not _is_relation(expr):
        return None
    (symbol,) = symbols_in
    if isinstance(expr, sympy.Eq) and isinstance(expr.rhs, sympy.Set):
        return (expr.rhs.doit(), symbol.name) if expr.lhs == symbol else None
    links = expr._unsorted_args if isinstance(expr, LazyAnd) else expr.args if isinstance(expr, sympy.And) else [expr]
    real = sympy.Symbol(symbol.name, real=True)
    return sympy.Intersection(*(link.doit().subs(symbol, real).as_set() for link in links)), symbol.name


def _split_conditions(text: str) -> list[str]:
    """The relations that commas separate; ``[text]`` for anything else."""
    parts = text.split(",")
    return parts if all(_RELATION.search(part) for part in parts) and not _BRACKETS.search(text) else [text]


def _without_parentheses(text: str) -> str:
    inner = text.strip()
    return inner[1:-1] if re.fullmatch(r"\((?=[^()<>=\\]*+[<>=\\])[^()]*+\)", inner) and "," not in inner else inner


def _is_condition(text: str) -> bool:
    return any(sign.search(text) for sign in (_OR, _AND, _BUILDER))


def same_real_set(gold_text: str, answer_text: str) -> bool:
    """True if both texts denote one set of real numbers, as conditions on one variable or as sets, where at least one
    of them cannot be anything else: ``(1, 2)`` may be a point."""
    are_sets = all(_SET_SIGN.search(text) for text in (gold_text, answer_text))
    if not are_sets and not _is_condition(gold_text + answer_text):
        return False
    try:
        gold, answer = real_set(gold_text), real_set(answer_text)
        if gold is None or answer is None or (gold[1] and answer[1] and gold[1] != answer[1]):
            return False
        return bool(gold[0] == answer[0] or gold[0].symmetric_difference(answer[0]).doit() == sympy.S.EmptySet)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # SymPy cannot solve the condition, or compare the sets
        return False


def _is_relation(expr: Any) -> bool:
    return isinstance(expr, (Relational, LazyAnd, sympy.And))


def objection(gold: Any, answer: Any) -> str:
    """Why ``answer`` cannot be right for ``gold``, whatever its value, or ``""``."""
    if is_undefined(answer):
        return "undefined value"
    if not _is_relation(answer):
        return ""
    if isinstance(answer, sympy.Eq) and isinstance(answer.lhs, (sympy.Symbol, AppliedUndef)):
        return ""  # x = 5, f(2) = 5
    if not getattr(answer, "free_symbols", None):
        return "relation between numbers"  # 6 = 5, 1 = 2 = 5
    if not _is_relation(gold) and isinstance(answer, sympy.Eq):
        return "equation where a value was asked for"  # x + y = 5
    if not _is_relation(gold) and isinstance(answer, (LazyAnd, sympy.And)) and not isinstance(gold, sympy.Set):
        return "several relations where a value was asked for"
    return ""


def far_apart(gold: Any, answer: Any, tolerance: float) -> bool:
    """True if both are constants and |answer − gold| > ``tolerance`` · |gold|; asked once they agree to six places."""
    value = answer.rhs if isinstance(answer, sympy.Eq) else answer
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (gold, value)):
        return False
    g, a = gold.doit().evalf(20), value.doit().evalf(20)
    if not (g.is_number and a.is_number) or g.is_infinite:
        return False
    return bool(abs(a - g) > tolerance * abs(g))


@lru_cache(maxsize=512)
def read_gold(text: str) -> tuple[Any, str]:
    """(SymPy object, "") of a gold answer, or (None, what is wrong with it)."""
    try:
        gold = read(text, last_side=True)
        if gold is None:
            return None, "cannot be parsed"
        if is_undefined(gold):
            return None, "undefined value"
        if not equal(gold, gold):
            return None, "not equal to itself"
        equal(gold, sympy.Integer(7))  # a gold answer that cannot be evaluated shows here, where no answer is to blame
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # SymPy raises all kinds of exceptions on malformed input
        return None, f"cannot be compared with itself ({type(error).__name__})"
    return gold, ""


_LIST, _TUPLE, _SET = "\1", "\2", "\3"
"""Marks between the items of lists: any order, the given order, any order and no duplicates."""
_NEAR, _WHERE = "\4", "\5"
"""Marks behind an answer: before its approximation, and before a condition that the gold answer does not have."""
_NEARBY = 0.05
"""Largest relative error of an approximation behind the exact value."""


def prepare() -> None:
    """Makes a process ready to judge: libraries log nothing, large binomials can be interrupted, the parser's tables
    are built and late imports are done."""
    logging.disable(logging.CRITICAL)
    _let_binomials_be_interrupted()
    judge("x^2+1", "(x+1)^2", 0.0)


def judge(gold_text: str, answer_text: str, tolerance: float) -> tuple[str, str]:
    """(status, detail) of one pair; both sides are the content of a box, or the items of lists with a mark between."""
    answer_text, _, near = answer_text.partition(_NEAR)
    answer_text, _, condition = answer_text.partition(_WHERE)
    if near and not _is_near(answer_text, near):
        return "wrong", "no approximation"
    if condition and not _excludes_only_undefined(gold_text, condition):
        return "wrong", "a condition that the gold answer does not have"
    for mark in (_LIST, _TUPLE, _SET):
        if mark in gold_text + answer_text:
            return _judge_lists(gold_text.split(mark), answer_text.split(mark), mark, tolerance)
    return _judge_one(gold_text, answer_text, tolerance)


def _is_near(exact_text: str, near_text: str) -> bool:
    """True if ``near`` is a number and within ``_NEARBY`` of ``exact``."""
    exact, near = (_value_of(read(text, last_side=True)) for text in (exact_text, near_text))
    return exact is not None and near is not None and bool(abs(exact - near) <= _NEARBY * abs(exact))


def _value_of(expr: Any) -> Any:
    """A number as a float of SymPy; ``None`` for anything else."""
    expr = expr.rhs if isinstance(expr, sympy.Eq) else expr
    value = expr.doit().evalf(15) if isinstance(expr, sympy.Expr) and expr.is_number else None
    return value if value is not None and value.is_number and value.is_finite else None


def _excludes_only_undefined(gold_text: str, condition_text: str) -> bool:
    r"""True if the gold answer has no real value where the condition does not hold, as far as a few points show,
    some of them at its ends: ``x\ne2`` for ``\frac{1}{x-2}``, ``x\ge0`` for ``\sqrt x``."""
    gold, condition = read(gold_text, last_side=True), real_set(condition_text)
    gold = gold.rhs if isinstance(gold, sympy.Eq) else gold
    if condition is None or not isinstance(gold, sympy.Expr):
        return False
    letters = [symbol for symbol in gold.free_symbols if symbol.name == condition[1]]
    excluded = sympy.S.Reals - condition[0]
    points: list[Any] = []
    for piece in excluded.args if isinstance(excluded, sympy.Union) else [excluded]:
        if isinstance(piece, sympy.FiniteSet):
            points += piece.args
        elif isinstance(piece, sympy.Interval):
            low, high = piece.start, piece.end
            ends = [(low, 1, piece.left_open), (high, -1, piece.right_open)]
            low = low if low.is_finite else (high if high.is_finite else sympy.Integer(0)) - 99
            high = high if high.is_finite else low + 99
            near = sympy.Min(sympy.Rational(1, 1000), (high - low) / 11)
            points += [low + (high - low) * sympy.Rational(k, 22) for k in (1, 10, 18, 21)]
            for end, inwards, is_open in ends:
                if end.is_finite:
                    points += [end + inwards * near] if is_open else [end, end + inwards * near]
        else:
            return False
    values = [gold.subs(dict.fromkeys(letters, point)).evalf(15) for point in points]
    return bool(letters and values) and not any(value.is_real and value.is_finite for value in values)


def _judge_lists(golds: list[str], answers: list[str], mark: str, tolerance: float) -> tuple[str, str]:
    """Judges lists item by item: with ``_TUPLE`` in order, else each gold item takes the first answer that is right for
    it; in a set several items may take the same."""
    for gold in golds:
        if fault := read_gold(gold)[1]:
            return "bad_gold", fault
    if mark == _TUPLE:
        verdicts = [_judge_one(g, a, tolerance) for g, a in zip(golds, answers, strict=True)]
        return next((verdict for verdict in verdicts if verdict[0] != "ok"), ("ok", ""))
    left = list(answers)
    for gold in sorted(golds, key=lambda item: item not in left):  # equal texts first
        found = next(
            (a for a in sorted(left, key=lambda a: a != gold) if _judge_one(gold, a, tolerance)[0] == "ok"), None
        )
        if found is None:
            return "wrong", ""
        if mark == _LIST:
            left.remove(found)
    if mark == _SET and not all(any(_judge_one(g, a, tolerance)[0] == "ok" for g in golds) for a in answers):
        return "wrong", ""
    return "ok", ""


def _judge_conditions(gold_text: str, answer_text: str, tolerance: float) -> tuple[str, str]:
    """Judges conditions on one variable by the sets that they denote, others part by part."""
    if same_real_set(gold_text, answer_text):
        return "ok", ""
    for word, other in ((_OR, _AND), (_AND, _OR)):
        golds, answers = word.split(gold_text), word.split(answer_text)
        if len(golds) == len(answers) > 1 and not other.search(gold_text + answer_text):
            return _judge_lists([part.strip() for part in golds], [part.strip() for part in answers], _LIST, tolerance)
    readable = same_real_set(gold_text, gold_text) or all(read(part) is not None for part in _AND.split(gold_text))
    return ("wrong", "") if readable else ("bad_gold", "cannot be parsed")


def _judge_one(gold_text: str, answer_text: str, tolerance: float) -> tuple[str, str]:
    if _is_condition(gold_text + answer_text):
        return _judge_conditions(gold_text, answer_text, tolerance)
    gold, fault = read_gold(gold_text)
    answer = read(answer_text)
    if gold is None:
        return ("wrong", fault) if gold_text == answer_text and is_undefined(answer) else ("bad_gold", fault)
    if answer is None:
        return "wrong", "cannot be parsed"
    if fault := objection(gold, answer):
        return "wrong", fault
    if not equal(gold, answer) and not same_real_set(gold_text, answer_text):
        return "wrong", ""
    if far_apart(gold, answer, tolerance):
        return "wrong", "tiny numbers that differ"
    return "ok", ""
