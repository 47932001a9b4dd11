r"""Compares ``MathReward`` and plain math-verify with Math-Verify's own test suite, and lists the differences.

The suite is not part of this repository. Fetch it first, then pass its folder of tests::

    git clone https://github.com/huggingface/Math-Verify && python benchmarks/math_verify_suite.py Math-Verify/tests

A pair is taken from every ``pytest.mark.parametrize`` with a ``gold``, a ``pred`` and an expected outcome. Both
verifiers get the same two texts. A text with a ``\boxed{…}`` is handed over as it stands, gold answers and predictions
alike. A text without one states its answer in a way that ``MathReward`` does not read, so a box is put around the first
of these that exists:

1. the whole text without its formula delimiters, if it begins with a formula and has at most 100 characters
   (``$28$ percent``), or if it holds no word;
2. the content of the last formula or number after the last ``answer is``, else of the last one in the text. A formula
   is ``$…$``, ``$$…$$``, ``\(…\)`` or ``\[…\]``; one with single delimiters that is broken over lines is none, nor is a
   number in it, because the suite expects so; a number includes the currency or percent sign or unit next to it;
3. the whole text.

``math_verify_policies.jsonl`` lists the pairs on which ``MathReward`` differs from the suite on purpose, by test and
place, with the policy. ``--common`` takes a file of another suite with the same pairs, such as lighteval's
``tests/unit/metrics/test_extractive_match.py``, and counts agreement on those that both have. The exit status is 1 if
agreement is below the floors.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import parser_of, publish
from math_verify import parse, verify

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.completion_text import last_boxed

POLICIES = Path(__file__).with_name("math_verify_policies.jsonl")
FLOOR_OVERALL, FLOOR_OUTSIDE_POLICIES = 0.92, 0.99
_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\)|\\\[|\\\]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_BROKEN = re.compile(r"(?<![\\$])\$[ \t]*\n[^$]*\$(?!\$)|\\\([ \t]*\n(?s:.*?)\\\)")
_PIECE = re.compile(
    r"\$\$(?P<display>.+?)\$\$|(?<!\\)\$(?P<inline>(?:[^$\n\\]|\\.)+)\$|\\\((?P<paren>.+?)\\\)|\\\[(?P<bracket>(?s:.+?))\\\]"
    r"|(?P<number>(?<![A-Za-z\d])[$€£]?\s?-?(?:\d+(?:[ ,.]\d+)*|\.\d+)(?:/\d+)?(?:\s?(?:\\?%|[$€£]|percent|pct|m²))?)"
    r"(?![A-Za-z])"
)


@dataclass(frozen=True)
class Pair:
    """One row of a parametrized test."""

    key: str
    """``file::test::place``, places counted from 0 in each test."""
    gold: str
    prediction: str
    right: bool


def read_suite(files: Iterable[Path]) -> Iterator[Pair]:
    """The pairs of all tests in ``files``, without running any of them; tables that name objects are left out."""
    for file in files:
        functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
        for function in functions:
            for decorator in function.decorator_list:
                if not (isinstance(decorator, ast.Call) and len(decorator.args) == 2):
                    continue
                names = [name.strip() for name in ast.literal_eval(decorator.args[0]).split(",")]
                outcome = next((n for n in ("expected", "result") if n in names), "")
                if not ({"gold", "pred"} <= set(names) and outcome):
                    continue
                with suppress(NameError):
                    yield from _pairs(f"{file.stem}::{function.name}", names, outcome, _rows(decorator.args[1]))


def _pairs(test: str, names: list[str], outcome: str, rows: list[tuple]) -> Iterator[Pair]:
    for place, values in enumerate(rows):
        row = dict(zip(names, values, strict=True))
        yield Pair(f"{test}::{place}", row["gold"], row["pred"], bool(row[outcome]))


def _rows(table: ast.expr) -> list[tuple]:
    """The rows of a table of literals; one test writes a number with ``math.sqrt``."""
    return eval(compile(ast.Expression(table), "table", "eval"), {"__builtins__": {}, "math": math})


def boxed(text: str) -> str:
    """``text`` with a box around its answer, by the rules at the top of this file."""
    if last_boxed(text) is not None:
        return text
    text = text.strip()
    if not _WORD.search(text) or (_DELIMITER.match(text) and len(text) <= 100 and "\n" not in text):
        return f"\\boxed{{{_DELIMITER.sub(' ', text).strip()}}}"
    text = _BROKEN.sub(" ", text)
    pieces = list(_PIECE.finditer(text, max(text.rfind("answer is"), 0))) or list(_PIECE.finditer(text))
    answer = next(g for g in pieces[-1].groups() if g is not None) if pieces else text
    return f"\\boxed{{{answer.strip()}}}"


def plain_verdict(gold: str, answer: str) -> bool:
    """The verdict of math-verify with its default settings."""
    return bool(verify(parse(gold), parse(answer)))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("tests", type=Path, help="folder of Math-Verify's tests")
    parser.add_argument("--common", type=Path, help="file of another suite, such as lighteval's")
    parser.add_argument("--show", action="store_true", help="print the text of the pairs that differ")
    options = parser.parse_args()
    policies = {row["pair"]: row["policy"] for row in map(json.loads, POLICIES.read_text().splitlines())}
    pairs = list(read_suite(sorted(options.tests.glob("test_*.py"))))
    if not pairs:
        parser.error(f"{options.tests} holds no test_*.py with gold, pred and an expected outcome")
    texts = [(boxed(pair.gold), boxed(pair.prediction)) for pair in pairs]
    reward = MathReward(soft_limit_s=5.0, hard_limit_s=20.0)
    scores = reward([answer for _, answer in texts], [gold for gold, _ in texts], {})
    reward.close()
    ours = [(score.value == 1.0) == pair.right for pair, score in zip(pairs, scores, strict=True)]
    plain = [plain_verdict(*text) == pair.right for pair, text in zip(pairs, texts, strict=True)]
    for pair, text, score, agree in zip(pairs, texts, scores, ours, strict=True):
        if not agree:
            said = f"suite {int(pair.right)}, here {score.value} {score.status}"
            print(f"{pair.key}: {said}; {policies.get(pair.key, 'NO POLICY')}")
            if options.show:
                print(f"    gold {text[0][-150:]!r}\n    answer {text[1][-150:]!r}\n    {score.detail!r}")
    outside = [agree for pair, agree in zip(pairs, ours, strict=True) if pair.key not in policies]
    idle = sorted(policies.keys() - {pair.key for pair, agree in zip(pairs, ours, strict=True) if not agree})
    result: dict[str, Any] = {
        "benchmark": "math_verify_suite",
        "pairs": len(pairs),
        "agreement": round(sum(ours) / len(pairs), 4),
        "agreement_outside_policies": round(sum(outside) / len(outside), 4),
        "pairs_by_policy": len(pairs) - len(outside),
        "policies_without_difference": idle,
        "plain_math_verify": round(sum(plain) / len(pairs), 4),
        "math_verify": version("math-verify"),
    }
    if options.common:
        places = {(pair.gold, pair.prediction, pair.right): i for i, pair in enumerate(pairs)}
        others = [(pair.gold, pair.prediction, pair.right) for pair in read_suite([options.common])]
        common = [places[other] for other in others if other in places]
        result |= {"common_pairs": len(common), "common_agreement": sum(ours[i] for i in common)}
        result["common_plain_math_verify"] = sum(plain[i] for i in common)
    publish(result, options.output)
    good = result["agreement"] >= FLOOR_OVERALL and result["agreement_outside_policies"] >= FLOOR_OUTSIDE_POLICIES
    return 0 if good and not idle else 1


if __name__ == "__main__":
    raise SystemExit(main())
