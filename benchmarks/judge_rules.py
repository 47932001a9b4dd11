r"""Measures ``MathReward`` on pairs of answers, and switches each of its rules off alone to find those that do nothing.

The pairs are ``tests/rewards/data/teacher_pairs.jsonl`` (judged as a careful teacher would; ``announced`` marks what
the docs announce), the table of docs/rewards.md, the hostile answers below, and, with ``--suite``, those of
Math-Verify's tests, which hold lighteval's (see ``math_verify_suite.py``).

With ``--ablate``, every regular expression, table and function of ``grpo_pl/rewards/mathematics`` is switched off
alone: a pattern matches nothing, a table is empty, a function of a text returns it unchanged, another finds nothing. Of
each the record has the first pair whose value changes, or none. A pattern is tried on the pairs in which it matches.
Tables from which others are made at import cannot be switched off here and show no pair.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common import parser_of, publish
from math_verify_suite import boxed, read_suite

from grpo_pl.rewards import MathReward, mathematics
from grpo_pl.rewards.completion_text import after_closed_thinking
from grpo_pl.rewards.mathematics.answer_rules import Job
from grpo_pl.rewards.mathematics.math_reward import _pair

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "grpo_pl" / "rewards" / "mathematics"
HOSTILE = [
    *(("5", answer, 0.0) for answer in [
        r"\boxed{9^{9^{9^9}}}", r"\boxed{((20!)!)!}", r"\boxed{100000000!}", r"\boxed{\binom{10^9}{5\cdot10^8}}",
        r"\boxed{5}\boxed{}", r"\boxed{}", r"\boxed{5", r"\boxed{6=5}", r"\boxed{5\0}", "\\boxed{5\u200f}",
        r"\boxed{" + "(" * 500 + "5" + ")" * 500 + "}", r"\boxed{" + "1 " * 5000 + "}", r"\boxed{__import__('os')}",
        r"\boxed{NaN}", r"\boxed{\frac10}",
    ]),
    ("5", r"\boxed{x=5}", 1.0), ("56088", r"\boxed{123\cdot456}", 0.0), ("5 m", r"\boxed{5 cm}", 0.0),
    ("50", r"\boxed{50\%}", 0.0), ("0.5", r"\boxed{50\%}", 1.0), ("10^{-21}", r"\boxed{10^{-20}}", 0.0),
    ("1/e", r"\boxed{\frac{1}{\mathrm e}}", 1.0), (r"2\pi", r"\boxed{2}", 0.0), ("1000", r"\boxed{1,000}", 1.0),
    ("5", "\\boxed{５}", 1.0), ("2", r"\boxed{\pm2}", 0.0), ("x", r"\boxed{(x+y+2)^{2000}}", 0.0),
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    suite: str
    gold: str
    completion: str
    expected: float
    answer_in: str = "box"
    announced: bool = False


def rows(tests: Path | None) -> Iterator[Row]:
    for line in (ROOT / "tests" / "rewards" / "data" / "teacher_pairs.jsonl").read_text().splitlines():
        row = json.loads(line)
        place, announced = row.get("answer_in", "box"), row.get("announced", False)
        yield Row("teacher", row["answer"], row["completion"], row["expected"], place, announced)
    table = (ROOT / "docs" / "rewards.md").read_text().split("| gold | answer | value | why |\n")[1].split("\n\n")[0]
    for line in table.splitlines()[1:]:
        golds, answers, values, _ = (cell.strip() for cell in line.strip("|").split("|"))
        texts, figures = re.findall("`([^`]+)`", answers), [float(value) for value in values.split(",")]
        for gold in re.findall("`([^`]+)`", golds):
            for text, figure in zip(texts, figures * (len(texts) if len(figures) == 1 else 1), strict=True):
                yield Row("docs", gold, f"\\boxed{{{text}}}", figure)
    for gold, text, value in HOSTILE:
        yield Row("hostile", gold, text, value)
    for pair in read_suite(sorted(tests.glob("test_*.py"))) if tests else ():
        yield Row("math-verify", boxed(pair.gold), boxed(pair.prediction), float(pair.right))


class Judge:
    """`MathReward` on single pairs; what a worker said of a pair is kept, so that a rule costs no algebra twice."""

    def __init__(self) -> None:
        places = {"box": {}, "auto": {}, "last_number": {}, "pattern": {"answer_pattern": "####"}}
        self.rewards = {place: MathReward(answer_in=place, workers=1, **more) for place, more in places.items()}  # type: ignore[arg-type]
        self.said: dict[tuple[str, str], Any] = {}

    def __call__(self, row: Row) -> str:
        """Status of a pair."""
        reward = self.rewards[row.answer_in]
        text = after_closed_thinking(row.completion)
        try:
            gold, answer = _pair(row.gold, reward.read(text).text, text)
            plan = reward.rules.plan(gold, answer)
            if not isinstance(plan, Job):
                return plan.status
            asked = (plan.gold, plan.answer + plan.beside)
            if asked not in self.said:
                (self.said[asked],) = self.rewards["box"].pool.run([asked])
            return reward.rules.review(plan, self.said[asked]).status
        except Exception as error:  # a rule that others rely on was switched off
            return type(error).__name__


class Counted:
    """A pattern that notes the pairs in which it matches."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.matched, self.row = pattern, set[int](), 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.pattern, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **more: Any) -> Any:
            text = arguments[1] if name in ("sub", "subn") else arguments[0]
            if self.row not in self.matched and self.pattern.search(text):
                self.matched.add(self.row)
            return found(*arguments, **more)

        return call


NOTHING = re.compile("(?!)")


def modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules([str(FOLDER)]) if info.name != "second_opinion"]
    return [importlib.import_module(f"{mathematics.__name__}.{name}") for name in names]


def clear_caches() -> None:
    for module in modules():
        for found in vars(module).values():
            if isinstance(found, functools._lru_cache_wrapper):
                found.cache_clear()


def switched_off(found: Any) -> Any:
    """What stands for a rule that is switched off; ``None`` for what is none."""
    if isinstance(found, re.Pattern):
        return NOTHING
    if isinstance(found, dict | set | frozenset | list | tuple) and found and not isinstance(found, type):
        return type(found)()
    function = inspect.unwrap(found) if callable(found) else None
    if inspect.isfunction(function):
        returned, takes = (
            str(inspect.signature(function).return_annotation),
            len(inspect.signature(function).parameters),
        )
        if returned == "bool":
            return lambda *_, **__: False
        if "None" in returned and returned != "None":
            return lambda *_, **__: None
        if returned == "str" and takes == 1:
            return lambda text: text
    return None


def rules() -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """(name, rule, function that puts something in its place) of everything that can be switched off."""
    seen = set[int]()
    for module in modules():
        for name, found in list(vars(module).items()):
            here = getattr(found, "__module__", module.__name__) == module.__name__
            if name.startswith("__") or isinstance(found, ModuleType | type) or id(found) in seen or not here:
                continue
            if name == "_REWRITES":
                for place, (pattern, replacement) in enumerate(list(found)):

                    def put(new: Any, place: int = place, replacement: Any = replacement, found: Any = found) -> None:
                        found[place] = (new, replacement)

                    yield f"canonical rewrite {pattern.pattern}", pattern, put
            elif switched_off(found) is not None:
                seen.add(id(found))
                users = [(m, key) for m in modules() for key, value in vars(m).items() if value is found]

                def put_all(new: Any, users: Any = users) -> None:
                    for user, key in users:
                        setattr(user, key, new)

                yield f"{module.__name__.rpartition('.')[2]}.{name}", found, put_all


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--suite", type=Path, help="folder of Math-Verify's tests")
    parser.add_argument("--ablate", action="store_true", help="switch each rule off alone")
    options = parser.parse_args()
    judge, pairs = Judge(), list(rows(options.suite))
    everything = list(rules())
    counted = [(name, Counted(rule), put) for name, rule, put in everything if isinstance(rule, re.Pattern)]
    if options.ablate:
        for _, counter, put in counted:
            put(counter)
    statuses = []
    for number, row in enumerate(pairs):
        clear_caches()
        for _, counter, _ in counted:
            counter.row = number
        statuses.append(judge(row))
    teacher = [(row, status == "ok") for row, status in zip(pairs, statuses, strict=True) if row.suite == "teacher"]
    plain = [(row.expected, paid) for row, paid in teacher if not row.announced]
    result: dict[str, Any] = {
        "benchmark": "judge_rules",
        "lines": sum(len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")),
        "teacher_wrong": sum(not expected for expected, _ in plain),
        "teacher_paid": sum(paid and not expected for expected, paid in plain),
        "teacher_right": sum(bool(expected) for expected, _ in plain),
        "teacher_refused": sum(not paid and bool(expected) for expected, paid in plain),
    }
    for suite in dict.fromkeys(row.suite for row in pairs):
        here = [(row, status) for row, status in zip(pairs, statuses, strict=True) if row.suite == suite]
        agree = sum((status == "ok") == bool(row.expected) for row, status in here)
        result[f"agreement: {suite}"] = f"{agree} of {len(here)}"
    if options.ablate:
        matched = {name: counter.matched for name, counter, _ in counted}
        for _, counter, put in counted:
            put(counter.pattern)
        result["rules"] = len(everything)
        found: dict[str, str] = {}
        for name, rule, put in everything:
            put(switched_off(rule))
            for number in sorted(matched.get(name, range(len(pairs)))):
                clear_caches()
                row = pairs[number]
                if (judge(row) == "ok") != (statuses[number] == "ok"):
                    found[name] = f"{row.suite}: {row.gold} <- {row.completion}"[:160]
                    break
            else:
                found[name] = ""
            put(rule)
            print(f"{name[:90]}: {found[name][:120] or 'NO ROW'}", file=sys.stderr, flush=True)
        result["first_row_that_changes"] = {name: row for name, row in found.items() if row}
        result["rules_without_a_row"] = [name for name, row in found.items() if not row]
    publish(result, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
