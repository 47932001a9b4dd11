r"""Compares ``MathReward`` and plain math-verify with Math-Verify's own test suite, and lists the differences.

The suite is not part of this repository. Fetch it first, then pass its folder of tests::

    git clone https://github.com/huggingface/Math-Verify && python benchmarks/math_verify_suite.py Math-Verify/tests

A pair is taken from every ``pytest.mark.parametrize`` with a ``gold``, a ``pred`` and an expected outcome. Both sides
are reduced to one answer in the same way, and both verifiers get the same text, ``\boxed{gold}`` and
``\boxed{answer}``. The answer of a text is the first of these that exists:

1. the content of its last closed ``\boxed{…}``, with braces matched, together with those of the boxes before it, as one
   list, as long as only ``and``, ``or``, punctuation and formula delimiters are between them;
2. the whole text without its formula delimiters, if it begins with a formula and has at most 100 characters
   (``$28$ percent``), or if it holds no word;
3. the content of the last formula or number after the last ``answer is``, else of the last one in the text. A formula
   is ``$…$``, ``$$…$$``, ``\(…\)`` or ``\[…\]``, on one line if it has single delimiters; a number includes the
   currency or percent sign or unit next to it;
4. the whole text.

``math_verify_policies.jsonl`` lists the pairs on which ``MathReward`` differs from the suite on purpose, by test and
place, with the policy. The exit status is 1 if agreement is below the floors.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.mathematics.answer_text import last_boxed

POLICIES = Path(__file__).with_name("math_verify_policies.jsonl")
FLOOR_OVERALL, FLOOR_OUTSIDE_POLICIES = 0.88, 0.99
_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\)|\\\[|\\\]")
_BETWEEN_BOXES = re.compile(r"(?:[\s$.,;]|\\[()\[\]]|\\quad|and|or|\\text\{\s*(?:and|or)\s*\})*")
_BOX = re.compile(r"\\boxed\s*\{")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
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


def read_suite(folder: Path) -> Iterator[Pair]:
    """The pairs of all tests in ``folder``, without running any of them."""
    for file in sorted(folder.glob("test_*.py")):
        functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
        for function in functions:
            for decorator in function.decorator_list:
                if not (isinstance(decorator, ast.Call) and len(decorator.args) == 2):
                    continue
                names = [name.strip() for name in ast.literal_eval(decorator.args[0]).split(",")]
                outcome = next((n for n in ("expected", "result") if n in names), "")
                if not ({"gold", "pred"} <= set(names) and outcome):
                    continue
                for place, values in enumerate(_rows(decorator.args[1])):
                    row = dict(zip(names, values, strict=True))
                    key = f"{file.stem}::{function.name}::{place}"
                    yield Pair(key, row["gold"], row["pred"], bool(row[outcome]))


def _rows(table: ast.expr) -> list[tuple]:
    """The rows of a table of literals; one test writes a number with ``math.sqrt``."""
    return eval(compile(ast.Expression(table), "table", "eval"), {"__builtins__": {}, "math": math})


def one_answer(text: str) -> str:
    """The answer of a text, by the rules at the top of this file."""
    if last_boxed(text) is not None:
        return _joined_boxes(text).strip()
    text = text.strip()
    if not _WORD.search(text) or (_DELIMITER.match(text) and len(text) <= 100 and "\n" not in text):
        return _DELIMITER.sub(" ", text).strip()
    pieces = list(_PIECE.finditer(text, max(text.rfind("answer is"), 0))) or list(_PIECE.finditer(text))
    return (next(g for g in pieces[-1].groups() if g is not None) if pieces else text).strip()


def _joined_boxes(text: str) -> str:
    """The contents of the last box and of its neighbours before it, as one list."""
    starts = [match.start() for match in _BOX.finditer(text)]
    parts: list[str] = []
    end = len(text)
    for start in reversed(starts):
        content = last_boxed(text[start:end])
        if content is None:
            continue
        close = text.index(content, start) + len(content) + 1
        if parts and not _BETWEEN_BOXES.fullmatch(text[close:end]):
            break
        parts.append(content)
        end = start
    return ", ".join(reversed(parts))


def plain_verdict(gold: str, answer: str) -> bool:
    """The verdict of math-verify with its default settings."""
    return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{answer}}}")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="folder of Math-Verify's tests")
    parser.add_argument("--show", action="store_true", help="print the text of the pairs that differ")
    options = parser.parse_args()
    policies = {row["pair"]: row["policy"] for row in map(json.loads, POLICIES.read_text().splitlines())}
    pairs = list(read_suite(options.tests))
    if not pairs:
        parser.error(f"{options.tests} holds no test_*.py with gold, pred and an expected outcome")
    texts = [(one_answer(pair.gold), one_answer(pair.prediction)) for pair in pairs]
    reward = MathReward(soft_limit_s=5.0, hard_limit_s=20.0)
    scores = reward([f"\\boxed{{{answer}}}" for _, answer in texts], [gold for gold, _ in texts], {})
    reward.close()
    ours = [(score.value == 1.0) == pair.right for pair, score in zip(pairs, scores, strict=True)]
    plain = [plain_verdict(*text) == pair.right for pair, text in zip(pairs, texts, strict=True)]
    for pair, text, score, agree in zip(pairs, texts, scores, ours, strict=True):
        if not agree:
            said = f"suite {int(pair.right)}, here {score.value} {score.status}"
            print(f"{pair.key}: {said}; {policies.get(pair.key, 'NO POLICY')}")
            if options.show:
                print(f"    gold {text[0][:150]!r}\n    answer {text[1][:150]!r}\n    {score.detail!r}")
    outside = [agree for pair, agree in zip(pairs, ours, strict=True) if pair.key not in policies]
    idle = sorted(policies.keys() - {pair.key for pair, agree in zip(pairs, ours, strict=True) if not agree})
    result: dict[str, Any] = {
        "pairs": len(pairs),
        "agreement": round(sum(ours) / len(pairs), 4),
        "agreement_outside_policies": round(sum(outside) / len(outside), 4),
        "pairs_by_policy": len(pairs) - len(outside),
        "policies_without_difference": idle,
        "plain_math_verify": round(sum(plain) / len(pairs), 4),
        "math_verify": version("math-verify"),
    }
    print(json.dumps(result))
    good = result["agreement"] >= FLOOR_OVERALL and result["agreement_outside_policies"] >= FLOOR_OUTSIDE_POLICIES
    return 0 if good and not idle else 1


if __name__ == "__main__":
    raise SystemExit(main())
