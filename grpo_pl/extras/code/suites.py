"""Reads the tests of a problem: the gold answer of a ``CodeReward``, in the forms of APPS, LiveCodeBench, MBPP and
HumanEval; splits each into what a program is given and what is expected of it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_pl.extras.code.asserts import BadTests, Variables, take_apart
from grpo_pl.extras.code.values import Unreadable, read_result, same_output, same_value

Step = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """End of a program."""

    cause: str
    """``ended`` by itself, or stopped for ``cpu``, ``wall`` or ``output``."""
    code: int
    """Its exit status, negative for a signal."""
    output: str
    errors: str
    results: Sequence[str]

    @property
    def went_well(self) -> bool:
        return self.cause == "ended" and self.code == 0


@dataclass(frozen=True)
class Run:
    """One process of a program, and what its outcome says about the tests that it decides."""

    input: str
    steps: tuple[Step, ...] | None
    """Values to ask the program for; None for one that reads ``input`` and prints."""
    judge: Callable[[Outcome], list[str]]
    """For each of its tests why it is not passed, or ``""``."""
    tests: int


Suite = tuple[Run, ...]


@lru_cache(maxsize=4096)
def read_suite(text: str) -> Suite:
    """The tests of a problem.

    Raises:
        BadTests: what is wrong with them.
    """
    try:
        tests = json.loads(text)
    except (ValueError, RecursionError):
        tests = text
    try:
        if isinstance(tests, dict):
            return _of_object(tests)
        if isinstance(tests, list) and tests and all(isinstance(entry, dict) for entry in tests):
            return _of_entries(tests)
        if isinstance(tests, list) and tests and all(isinstance(entry, str) for entry in tests):
            return _of_python("\n".join(tests))
        if isinstance(tests, str):
            return _of_python(tests)
    except BadTests:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:  # the text is no Python
        raise BadTests(f"{type(error).__name__}: {error}") from None
    raise BadTests("neither an object with inputs and outputs, nor a list of tests, nor assertions in Python")


# --- APPS, LiveCodeBench ----------------------------------------------------------------------------------------------


def _of_object(tests: dict[str, Any]) -> Suite:
    """``{"inputs": […], "outputs": […]}``, with ``fn_name`` where a function is called."""
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not (isinstance(inputs, list) and isinstance(outputs, list)) or len(inputs) != len(outputs) or not inputs:
        raise BadTests("an object with tests needs as many outputs as inputs, one at least")
    if function is None:
        return tuple(_printing(_lines(given), _lines(wanted)) for given, wanted in zip(inputs, outputs, strict=True))
    if all(isinstance(given, str) for given in inputs):  # LiveCodeBench: JSON, an argument a line
        return _calling(function, [_arguments(given) for given in inputs], [[_value(text)] for text in outputs])
    if not all(isinstance(given, list) for given in inputs):
        raise BadTests("the inputs of a function must be lists of its arguments, or JSON with an argument a line")
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for wanted in outputs)
    return _calling(function, inputs, [[wanted, wanted[0]] if wrapped else [wanted] for wanted in outputs])


def _of_entries(tests: list[dict[str, Any]]) -> Suite:
    """``[{"input": …, "output": …, "testtype": …}, …]``; a function has its name in ``fn_name``."""
    if not all(isinstance(entry.get("input"), str) and isinstance(entry.get("output"), str) for entry in tests):
        raise BadTests("each test of a list needs input and output, both texts")
    columns: dict[str, Any] = {f"{name}s": [entry[name] for entry in tests] for name in ("input", "output")}
    kinds = {str(entry.get("testtype", "stdin")) for entry in tests}
    if kinds == {"stdin"}:
        return _of_object(columns)
    if kinds != {"functional"}:
        raise BadTests(f"testtype must be stdin for all tests, or functional for all, got {sorted(kinds)}")
    names = [entry.get("fn_name") for entry in tests]
    if names[0] is None or any(name != names[0] for name in names):
        raise BadTests("tests with testtype functional need fn_name, the same in each: LiveCodeBench's func_name")
    return _of_object({**columns, "fn_name": names[0]})


def _lines(cell: Any) -> str:
    """A text that is read or printed, given as such or as a list of its lines."""
    lines = cell if isinstance(cell, list) else [cell]
    if not all(isinstance(line, str) for line in lines):
        raise BadTests(f"inputs and outputs of a program must be texts, got {repr(cell)[:60]}")
    return "\n".join(lines)


def _arguments(text: str) -> list[Any]:
    return [_value(line) for line in text.split("\n") if line.strip()]


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise BadTests(f"{str(text)[:60]!r} is no JSON") from None


def _printing(given: str, wanted: str) -> Run:
    def judge(outcome: Outcome) -> list[str]:
        if not outcome.went_well:
            return [_end_of(outcome)]
        return ["" if same_output(outcome.output, wanted) else f"printed {outcome.output[:60]!r}"]

    return Run(given, None, judge, 1)


def _calling(function: Any, inputs: list[list[Any]], outputs: list[list[Any]]) -> Suite:
    """One process for all calls; of each, any of the ``outputs`` is right."""
    if not isinstance(function, str) or not function.isidentifier():
        raise BadTests(f"fn_name must be the name of a function, got {str(function)[:60]!r}")

    def holds(wanted: list[Any]) -> Callable[[Sequence[Any]], bool]:
        return lambda values: any(same_value(values[0], one) for one in wanted)

    steps = tuple({"call": function, "arguments": arguments} for arguments in inputs)
    return (_asking(steps, [(1, holds(wanted)) for wanted in outputs]),)


# --- assertions -------------------------------------------------------------------------------------------------------


def _of_python(source: str) -> Suite:
    """Assertions as in MBPP, or HumanEval's ``check(candidate)`` followed by a call of it; other statements run before
    those that follow them."""
    steps: list[Step] = []
    tests: list[tuple[int, Callable[[Sequence[Any]], bool]]] = []
    variables, before = Variables(), 0
    for statement in _statements(ast.parse(source)):
        if isinstance(statement, ast.Assert):
            asked, holds = take_apart(statement.test, variables.held)
            steps += [{"eval": question} for question in asked]
            tests.append((before + len(asked), _behind(before, holds)))
            before = 0
        elif any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            raise BadTests(f"{ast.unparse(statement).splitlines()[0][:60]!r} holds assertions: they must stand alone")
        elif isinstance(statement, ast.Expr) and variables.calls(statement):
            steps.append({"eval": f"({ast.unparse(statement)}, None)[1]"})  # its error fails the next assertion
            before += 1
        else:
            steps.append({"exec": ast.unparse(statement)})
        variables.follow(statement)
    if not tests:
        raise BadTests("no assertion")
    return (_asking(tuple(steps), tests),)


def _behind(before: int, holds: Callable[[Sequence[Any]], bool]) -> Callable[[Sequence[Any]], bool]:
    """``holds`` for values behind those of calls whose results are not looked at."""
    return lambda values: holds(values[before:])


def _statements(tree: ast.Module) -> Iterable[ast.stmt]:
    """The statements of a module; ``check(f)`` is replaced by the body of ``check`` with ``f`` for its argument."""
    functions = [s for s in tree.body if isinstance(s, ast.FunctionDef) and len(s.args.args) == 1]
    checks = {f.name: f for f in functions if any(isinstance(statement, ast.Assert) for statement in f.body)}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) if name in checks:
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name(id=function)])) if name in checks:
                (argument,) = checks[name].args.args
                yield ast.parse(f"{argument.arg} = {function}").body[0]
                yield from checks[name].body
            case _:
                yield statement


def _asking(steps: tuple[Step, ...], tests: Sequence[tuple[int, Callable[[Sequence[Any]], bool]]]) -> Run:
    """A run of steps; each test looks at as many of the values, in order, as it says."""

    def judge(outcome: Outcome) -> list[str]:
        faults, at = [], 0
        for count, holds in tests:
            faults.append(_fault(outcome, at, count, holds))
            at += count
        return faults

    return Run("", steps, judge, len(tests))


def _fault(outcome: Outcome, at: int, count: int, holds: Callable[[Sequence[Any]], bool]) -> str:
    values = []
    for line in outcome.results[at : at + count]:
        try:
            value, error = read_result(line)
        except Unreadable as unreadable:
            return str(unreadable)
        if error:
            return error
        values.append(value)
    if len(values) < count:
        return "no result" if outcome.went_well else _end_of(outcome)
    return "" if holds(values) else f"gave {_shown(values)}"


def _shown(values: Sequence[Any]) -> str:
    try:
        return ", ".join(repr(value)[:60] for value in values)
    except (ValueError, RecursionError):  # an integer with too many digits
        return "a value too long to show"


def _end_of(outcome: Outcome) -> str:
    last = next((line for line in reversed(outcome.errors.splitlines()) if line.strip()), "")
    if outcome.cause == "ended":
        return last[:200] or f"ended with {outcome.code}"
    return {"cpu": "over its CPU time", "wall": "over its time", "output": "too much output"}.get(
        outcome.cause, "ended"
    )
