r"""Measures ``MathReward`` on pairs of answers, and switches each of its rules off alone to find those that do nothing.

The pairs are ``tests/rewards/data/teacher_pairs.jsonl`` (judged as a careful teacher would; ``announced`` marks what
the docs announce), the table of docs/rewards.md, ``tests/rewards/data/hostile_pairs.jsonl``, and, with ``--suite``,
those of Math-Verify's tests, which hold lighteval's (see ``math_verify_suite.py``).

With ``--ablate``, every rule of ``grpo_pl/rewards/mathematics`` is switched off alone, by a change of the source of one
module, with which the whole package is imported afresh in a process of its own: a regular expression matches nothing; a
table, or a rule of a table, is gone; a function of a text returns it unchanged, another finds nothing, or always
something; the body of an ``if`` is left out. Of each the record has the first pair whose value changes, or none. With
``--more``, files of further pairs, tried where no other pair changes, show what else a rule does.
"""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import re
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from common import parser_of, processor, publish
from math_verify_suite import boxed, read_suite

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.sandbox.pool import Verdict, WorkerPool

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "grpo_pl.rewards.mathematics"
FOLDER = ROOT.joinpath(*PACKAGE.split("."))
DATA = ROOT / "tests" / "rewards" / "data"
NO_RULES = ("__init__", "math_reward", "second_opinion")
"""Modules that apply the rules, or belong to other rewards."""
PLACES: dict[str, dict[str, Any]] = {
    "box": {}, "auto": {}, "last_number": {}, "pattern": {"answer_pattern": "####"},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    suite: str
    gold: str
    completion: str
    expected: float | None
    status: str = ""
    """The status it must have; ``""`` for any that fits the value."""
    answer_in: str = "box"
    announced: bool = False

    def saw(self, status: str) -> float | str | None:
        """What counts of a status: itself where the row names one, else the value of the reward."""
        known = {"ok": 1.0, "bad_gold": None, "unavailable": None}
        return status if self.status or status.endswith("Error") else known.get(status, 0.0)

    def agrees(self, status: str) -> bool:
        return self.saw(status) == (self.status or self.expected)


def read_rows(suite: str, file: Path) -> Iterator[Row]:
    for row in map(json.loads, file.read_text().splitlines()):
        expected = None if row["expected"] in (None, "bad_gold") else float(row["expected"])
        more = {key: row[key] for key in ("status", "answer_in", "announced") if key in row}
        yield Row(suite, row["answer"], row["completion"], expected, **more)


def rows(tests: Path | None) -> Iterator[Row]:
    yield from read_rows("teacher", DATA / "teacher_pairs.jsonl")
    table = (ROOT / "docs" / "rewards.md").read_text().split("| gold | answer | value | why |\n")[1].split("\n\n")[0]
    for line in table.splitlines()[1:]:
        golds, answers, values, _ = (cell.strip() for cell in line.strip("|").split("|"))
        texts, figures = re.findall("`([^`]+)`", answers), [float(value) for value in values.split(",")]
        for gold in re.findall("`([^`]+)`", golds):
            for text, figure in zip(texts, figures * (len(texts) if len(figures) == 1 else 1), strict=True):
                yield Row("docs", gold, f"\\boxed{{{text}}}", figure)
    yield from read_rows("hostile", DATA / "hostile_pairs.jsonl")
    for pair in read_suite(sorted(tests.glob("test_*.py"))) if tests else ():
        yield Row("math-verify", boxed(pair.gold), boxed(pair.prediction), float(pair.right))


# --- rules switched off ---

Switch = tuple[str, str, ast.Module]
"""Module, name of a rule, and the module without it."""


def neutral(value: ast.expr) -> ast.expr | None:
    """What stands in place of a value at the top of a module; ``None`` for what is no rule."""
    match value:
        case ast.Call(func=ast.Attribute(attr="compile")):
            return ast.parse("re.compile('(?!)')", mode="eval").body
        case ast.Call(func=ast.Name("words_of" | "frozenset")):
            return ast.parse("frozenset()", mode="eval").body
        case ast.Dict() | ast.DictComp():
            return ast.Dict([], [])
        case ast.List() | ast.ListComp():
            return ast.List([], ast.Load())
        case ast.Set() | ast.SetComp():
            return ast.parse("set()", mode="eval").body
        case ast.Tuple():
            return ast.Tuple([], ast.Load())
        case ast.Constant(value=str()) | ast.JoinedStr():
            return ast.Constant("(?!)")
    return None


def entries(value: ast.expr) -> Iterator[tuple[str, list[list[Any]], int]]:
    """(text, lists that lose an item, place) of each rule of a table: a pattern or function, with what belongs to it.
    A table of texts and numbers is data, such as that of units."""
    nodes = list(ast.walk(value))
    table = next((node for node in nodes if isinstance(node, ast.Dict | ast.List)), None)
    if table is None or not any(isinstance(node, ast.Attribute) for node in nodes):
        return
    columns: list[list[Any]] = [table.keys, table.values] if isinstance(table, ast.Dict) else [table.elts]
    for place, item in enumerate(columns[0]):
        yield ast.unparse(item or table), columns, place


def neutral_bodies(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function returns that is switched off, in one way or two; nothing for a function that is no rule."""
    returned = ast.unparse(function.returns) if function.returns else ""
    texts = [a.arg for a in function.args.args if a.annotation and ast.unparse(a.annotation) == "str"]
    first = texts[0] if texts else ""
    forms = {
        "bool": ["False", "True"], "str": [first], "list[str]": ["[]"],
        "tuple[str, str]": [f"({first}, '')", f"('', {first})"] if len(texts) == 1 else [f"({', '.join(texts[:2])})"],
    }  # fmt: skip
    if "None" in returned and returned != "None":
        yield ast.Constant(None)
    elif texts and len(texts) < 4:
        yield from (ast.parse(form, mode="eval").body for form in forms.get(returned, []))


def switches(name: str, tree: ast.Module) -> Iterator[Switch]:
    """Every rule of a module, each with a copy of the module without it. ``tree`` is changed and changed back."""

    def without(rule: str) -> Switch:
        return name, rule, ast.fix_missing_locations(deepcopy(tree))

    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            value, put = statement.value, neutral(statement.value)
            if put is None:
                continue
            statement.value = put
            yield without(ast.unparse(target))
            statement.value = value
            for text, table, place in entries(value):
                items = [column.pop(place) for column in table]
                yield without(f"{ast.unparse(target)}: {text}")
                for column, item in zip(table, items, strict=True):
                    column.insert(place, item)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        body = function.body
        for value in neutral_bodies(function):
            function.body = [ast.Return(value)]
            yield without(f"{function.name} -> {ast.unparse(value)}")
            function.body = body
        for node in [node for part in body for node in ast.walk(part) if isinstance(node, ast.If)]:
            test = node.test
            node.test = ast.Constant(False)
            yield without(f"{function.name}: if {ast.unparse(test)}")
            node.test = test


def all_switches() -> Iterator[Switch]:
    for file in sorted(FOLDER.glob("*.py")):
        if file.stem not in NO_RULES:
            yield from switches(file.stem, ast.parse(file.read_text()))


# --- judging ---


class Asked:
    """Stands for the pool of workers in a child: what they said of a pair before is known, all else the parent asks."""

    def __init__(self, said: dict[tuple[str, str], Verdict], parent: Connection) -> None:
        self.said, self.parent = said, parent

    def run(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        if missing := [pair for pair in pairs if pair not in self.said]:
            self.parent.send(missing)
            self.said |= dict(zip(missing, self.parent.recv(), strict=True))
        return [self.said[pair] for pair in pairs]


def changed_package(switch: Switch | None) -> ModuleType:
    """``mathematics.math_reward``, with the package imported afresh and one of its modules changed."""
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    if switch is not None:
        module = ModuleType(f"{PACKAGE}.{switch[0]}")
        module.__package__ = PACKAGE
        importlib.import_module(PACKAGE)
        sys.modules[module.__name__] = module
        exec(compile(switch[2], str(FOLDER / f"{switch[0]}.py"), "exec"), module.__dict__)
    return importlib.import_module(f"{PACKAGE}.math_reward")


def judge_in_child(
    switch: Switch | None,
    pairs: Sequence[Row],
    before: Sequence[str],
    said: dict[tuple[str, str], Verdict],
    parent: Connection,
) -> None:
    """Sends the statuses of all pairs, or the place of the first whose value changes from ``before``."""
    statuses = []
    try:
        package = changed_package(switch)
        rewards = {place: package.MathReward(answer_in=place, **more) for place, more in PLACES.items()}
    except Exception:  # other rules are made of this one
        parent.send("cannot be imported without")
        return
    for reward in rewards.values():
        reward.pool = Asked(said, parent)
    for number, row in enumerate(pairs):
        try:
            status = rewards[row.answer_in]([row.completion], [row.gold], {})[0].status
        except Exception as error:  # a rule that others rely on was switched off
            status = type(error).__name__
        if before and row.saw(status) != row.saw(before[number]):
            parent.send(number)
            return
        statuses.append(status)
    parent.send(tuple(statuses))


class Judge:
    """Judges pairs with one rule switched off; keeps what the workers said."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool, self.said = pool, dict[tuple[str, str], Verdict]()

    def __call__(self, switch: Switch | None, pairs: Sequence[Row], before: Sequence[str] = ()) -> Any:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")  # what is imported stays
        child = context.Process(target=judge_in_child, args=(switch, pairs, before, self.said, theirs))
        child.start()
        theirs.close()
        try:
            while isinstance(told := ours.recv(), list):
                verdicts = self.pool.run(told)
                self.said |= dict(zip(told, verdicts, strict=True))
                ours.send(verdicts)
        except EOFError:
            told = "ended the process"
        child.join()
        return told


def counts(pairs: Sequence[Row], statuses: Sequence[str]) -> dict[str, Any]:
    """How often the judge is right in each suite, and its two kinds of error on what the docs do not announce."""
    rated = zip(pairs, statuses, strict=True)
    plain = [(s == "ok", row.expected) for row, s in rated if row.suite == "teacher" and not row.announced]
    result: dict[str, Any] = {
        "teacher_wrong": sum(not expected for _, expected in plain),
        "teacher_paid": sum(p and not expected for p, expected in plain),
        "teacher_right": sum(expected == 1 for _, expected in plain),
        "teacher_refused": sum(not p and expected == 1 for p, expected in plain),
    }
    for suite in dict.fromkeys(row.suite for row in pairs):
        here = [row.agrees(status) for status, row in zip(statuses, pairs, strict=True) if row.suite == suite]
        result[f"agreement: {suite}"] = f"{sum(here)} of {len(here)}"
    return result


def ablation(judge: Judge, pairs: Sequence[Row], statuses: Sequence[str], only: str) -> dict[str, Any]:
    found: dict[str, str] = {}
    for switch in all_switches():
        name = f"{switch[0]}.{switch[1]}"
        if not re.search(only, name):
            continue
        told = judge(switch, pairs, statuses)
        row = pairs[told] if isinstance(told, int) else None
        said = f"{row.suite}: {row.gold} <- {row.completion}"[:160] if row else told if isinstance(told, str) else ""
        found[name] = said
        print(f"{name[:150]}\t{said[:120] or 'NO ROW'}".replace("\n", " "), file=sys.stderr, flush=True)
    return {
        "rules": len(found),
        "first_row_that_changes": {name: row for name, row in found.items() if row},
        "rules_without_a_row": [name for name, row in found.items() if not row],
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--suite", type=Path, help="folder of Math-Verify's tests")
    parser.add_argument("--ablate", action="store_true", help="switch each rule off alone")
    parser.add_argument("--only", default="", help="regular expression of the names of the rules to switch off")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="files of further pairs")
    options = parser.parse_args()
    reward = MathReward(soft_limit_s=5.0, hard_limit_s=20.0)
    reward.start()
    judge = Judge(reward.pool)
    pairs = list(rows(options.suite)) + [row for file in options.more for row in read_rows(file.stem, file)]
    statuses = judge(None, pairs)
    result: dict[str, Any] = {
        "benchmark": "judge_rules",
        "device": processor(),
        "lines": sum(len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")),
        **counts(pairs, statuses),
    }
    if options.ablate:
        result |= ablation(judge, pairs, statuses, options.only)
    reward.close()
    publish(result, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
