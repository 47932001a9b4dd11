"""No text of a program, a completion or a judging model makes a judge of this process raise; 20,000 of them, seeded."""

# ruff: noqa: E501

import json
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from grpo_pl.extras.code.code_reward import _finding
from grpo_pl.extras.code.suites import BadTests, Outcome, read_suite
from grpo_pl.extras.code.values import Unreadable, read_result, same_output, same_value
from grpo_pl.extras.judges.endpoint import tagged
from grpo_pl.extras.judges.judge import _verdict
from grpo_pl.extras.judges.rubric import RubricReward, read_verdict
from grpo_pl.rewards import (
    CountdownReward,
    ExactReward,
    MathReward,
    ReasoningGymReward,
    Score,
    SortingReward,
)
from grpo_pl.rewards.answer_reading import AnswerReward
from grpo_pl.rewards.base import MissingColumn
from grpo_pl.rewards.completion_text import boxed_or_block, last_program, stated_answer
from grpo_pl.rewards.mathematics.answer_rules import Job
from grpo_pl.rewards.sandbox.gym_entry import unpack
from grpo_pl.rewards.sandbox.pool import SandboxedReward, Verdict
from grpo_pl.rewards.voting import answer_classes
from tests.rewards.shipped import NAMES, SHIPPED, make

# fmt: off
NUMBERS = [
    "sNaN", "-sNaN1", "NaN", "nan", "inf", "-Infinity", "1e999999999", "-1e-999999999", "1E+400", "1_000", "0x1F", "0b1", "1.", ".5",
    "+-1", "--1", "1e", "1e5e5", "²", "½", "Ⅷ", "٣", "７", "𝟙", "一", "00", "-0", "7" * 401, "7" * 4301, "1/0", "0/0", "1" * 30 + "e99",
    "1,000", "1 000", "12:00", "5%", r"50\%", "1j", "True", "None", "0.1", "1/3",
]
MARKUP = [
    "<think>", "</think>", "<answer>", "</answer>", r"\boxed{", r"\boxed", "}", "{", "\\", "$", r"\(", r"\[", r"\frac", r"\frac{", "^", "_",
    r"\text{", r"\sqrt", r"\times", r"\cdot", r"\div", "=", "==", "+", "-", "*", "**", "/", "//", "(", ")", "[", "]", "<", ">", ",", ";", ":",
    "'", '"', "`", "```", "```python\n", "\n```\n", "#", "!", "?", "~", "|", "&", r"\pm", r"\le", r"\in", r"\pi", r"\infty", r"\quad", r"\,",
]
CHARACTERS = [
    " ", "\n", "\r\n", "\t", "\x00", "\x1c", "\x85", "\ud800", "\udfff\ud800", "\u200b", "\u202e", "\u2028", "\ufeff", "\u0301", "\U0010ffff",
    "é", "和", "П", "aП", "ﬃ", "İ", "ß", "\U0001f469\u200d\U0001f469",
]
WORDS = [
    "yes", "x", "assert f(1) == 2", "assert f(", "def f(x): return x", "SAME", "different", '{"met": true}', '{"met": ', '{"value": ',
    '{"error": ', "1 2 3", "and", "7+5", "12", "not", "lambda: 0", "import os", "import math\nassert math.isclose(f(1), 2)",
]
VALUES = [
    "NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "null", "true", '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]", '{"tuple": [1, 2]}',
    '{"set": [1, NaN]}', '{"set": [[1]]}', '{"dict": [[1, 2]]}', '{"dict": [[[1], 2]]}', '{"dict": 1}', '{"other": ["A"]}', '{"other": 1}',
    '{"other": ["A", [1]]}', '{"decimal": "sNaN"}', '{"decimal": "NaN"}', '{"decimal": "1e99999999"}', '{"decimal": "1e400"}',
    '{"decimal": []}', '{"fraction": [1, 3]}', '{"fraction": [1, 0]}', '{"fraction": ["x", 1]}', '{"complex": [1, NaN]}', '{"complex": 1}',
    '{"range": [0, 5, 1]}', '{"range": [0, 5, 0]}', '{"range": [0, 99999999999, 1]}', '{"range": 1}', '{"bytes": "zz"}', '{"bytes": "00"}',
    '{"deque": [1]}', '{"iterator": [1]}', '{"keys": [1]}', '{"values": [1]}', '{"items": [[1, 2]]}', '{"items": [1]}', '{"date": "2024-02-03"}',
    '{"date": "x"}', '{"datetime": 5}', '{"time": "25:00"}', '{"timedelta": [1, 2, 3]}', '{"timedelta": [1e300]}', '{"value": 1}', "1", "-1.5",
    '"a"', '{"a": 1, "b": 2}', "[" * 5000, "[" * 500 + "]" * 500, '{"tuple": [' * 300 + "]}" * 300, '{"set": [{"tuple": [1, {"decimal": "7"}]}]}',
]
NESTED = ["[", "(", "{", '{"a":', "((", "-", "1+", "not ", r"\boxed{", r"\frac{", "<think>", "<answer>", "2**", "[0, ", "f(", "a.", "~"]
TOLD = [
    "f(1) == 2", "f(1) < 2 <= g(1)", "f(1) in [1, 'a', (2,)]", "g(1) in f(1)", "f(1) + g(1) == 3",
    "f(1) * g(1) == 'aa'", "f(1) ** g(1) == 4", "f(1) % g(1) == 1", "f(1) / g(1) == 0.5", "f(1) // g(1) == 0",
    "-f(1) == 1", "abs(f(1) - g(1)) < 1e-6", "set(f(1) + g(1)) == {1}", "{f(1), g(1)} == {1}", "{f(1): g(1)} == {1: 2}",
    "[1, 2][f(1)] == 2", "(f(1), g(1))[0][1] == 2", "round(f(1), g(1)) == 1", "max(f(1), g(1)) == 1",
    "sum([f(1), g(1)]) == 1", "sorted([f(1), g(1)]) == [1, 2]", "int(f(1) + g(1)) == 3", "float(f(1) + g(1)) == 3",
    "str(f(1) + g(1)) == '3'", "Fraction(f(1), g(1)) == 3", "Decimal(f(1) + g(1)) == 3", "complex(f(1), g(1)) == 3",
    "range(f(1), g(1)) == range(3)", "date(f(1), g(1), 1) == date(2024, 1, 1)", "timedelta(f(1), g(1)) == timedelta(1)",
    "Counter(f(1) + g(1)) == {1: 2}", "math.isclose(f(1), g(1))", "cmath.isclose(f(1), g(1))",
    "dict(f(1) + g(1)) == {1: 2}", "not (f(1) and g(1))", "f(1) is g(1)", "bytes(f(1) + g(1)) == b'a'",
]
# fmt: on
ASSERTIONS = [read_suite(f"assert {told}")[0] for told in TOLD]
CALLS = read_suite(json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [[1, {"a": 2.5}]]}))[0]


def texts(rng: random.Random) -> Iterator[str]:
    """Texts of the pieces above, some of them deep, some long."""
    everything = [*NUMBERS, *MARKUP, *CHARACTERS, *WORDS, *VALUES]
    while True:
        kind = rng.random()
        if kind < 0.15:
            yield rng.choice(everything)
        elif kind < 0.2:
            yield rng.choice(NESTED) * rng.choice([5, 60, 3000])
        else:
            pools = [rng.choice([NUMBERS, MARKUP, CHARACTERS, WORDS, VALUES, everything]) for _ in range(2)]
            text = "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(2, 9)))
            form = rng.choice(
                ["{}", "{}", r"\boxed{{{}}}", r"x</think>\boxed{{{}}}", "<think>x</think><answer>{}</answer>"]
            )
            yield form.format(text)


def length(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


NEEDED: dict[str, dict[str, Any]] = {
    "FunctionReward": {"function": length},
    "PerSource": {"rewards": {"a": CountdownReward(), "b": SortingReward()}},
}
HERE = [
    name for name, kind in SHIPPED.items() if not issubclass(kind, SandboxedReward) and (kind.trusted or name in NEEDED)
]
"""Rewards that judge texts in this process; `MathReward` and others with a part elsewhere are below."""
REWARDS = [make(name, **NEEDED.get(name, {})) for name in NAMES if name.partition(" ")[0] in HERE]
REWARDS.append(ExactReward(answer_in="pattern", answer_pattern=r"answer>\s*(\S+)"))


def sound(scores: Sequence[Score]) -> None:
    for score in scores:
        assert score.value is None or math.isfinite(score.value)
        json.dumps(score.to_dict(), ensure_ascii=False, allow_nan=False).encode()


def judged(told: list[str], golds: list[str]) -> None:
    """Every reward, with these gold answers, and as votes."""
    count = len(told)
    columns = {
        "prompt": golds,
        "completion_length": [len(text) for text in told],
        "source": ["a", "b"] * (count // 2),
        "numbers": [[12, 3, 7, 5]] * count,
        "episode": [{"return": 0.5, "status": "ok", "turns": [{"reward": 0.5}], "detail": text} for text in told],
    }
    for reward in REWARDS:
        for gold in (golds, ["7 5 3 12"] * count, ["12"] * count):
            scores = reward(told, gold, columns)
            assert len(scores) == count
            sound(scores)
        answer_classes(reward, completions=told, scores=scores, columns=columns, group_size=2)


MATH, GYM = MathReward(workers=1), ReasoningGymReward(workers=1)


def read(text: str, other: str, rng: random.Random) -> None:
    """All that reads a text of a completion, a program or a model, one after another."""
    for answer in (text, boxed_or_block(text), stated_answer(text)):
        plan = MATH.rules.plan(other, answer)
        if isinstance(plan, Job):
            MATH.rules.review(plan, Verdict(rng.choice(["ok", "wrong", "bad_gold"]), other))
        MATH.rules.gold_fault(answer)
    _verdict(text)
    read_verdict(text)
    tagged({"response": text}).encode()
    sound([GYM._score(Verdict("wrong", text)), Score(0.0, "wrong", text)])
    last_program(text)
    raises_only(BadTests, read_suite, text)
    raises_only(ValueError, unpack, text)
    raises_only(MissingColumn, RubricReward(model="m", base_url="http://x", column="c")._read, text)


def raises_only(kind: type[Exception], call: Callable[[str], object], text: str) -> None:
    with suppress(kind):
        call(text)


def ran(text: str, other: str, rng: random.Random) -> None:
    """What a program printed and what it gave back, against what is expected."""
    assert isinstance(same_output(text, other), bool)
    assert isinstance(same_output(rng.choice(NUMBERS), rng.choice(NUMBERS)), bool)
    lines = [text, *(f'{{"value": {value}}}' for value in (rng.choice(VALUES), rng.choice(VALUES), text))]
    for line in lines:
        try:
            found, _ = read_result(line)
        except Unreadable:
            continue
        for expected in (1, 1.5, "a", None, [1], {"1": 2}, True):
            assert isinstance(same_value(found, expected), bool)
    picked = [rng.choice(lines[1:]) for _ in range(2)]
    outcome = Outcome("ended", 0, text, other, picked)
    for run in (CALLS, rng.choice(ASSERTIONS)):
        (fault,) = run.judge(outcome)
        sound([Score(0.0, "wrong", fault)])
        _finding(run, Verdict("ok", json.dumps(outcome.__dict__)))


def judge_all(count: int, seed: int) -> None:
    rng = random.Random(seed)
    source = texts(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of texts that are read as Python
        for _ in range(count // 20):
            told, golds = ([next(source) for _ in range(20)] for _ in range(2))
            judged(told, golds)
            for text, other in zip(told, golds, strict=True):
                read(text, other, rng)
                ran(text, other, rng)


def test_no_text_makes_a_judge_raise() -> None:
    judge_all(200, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_none_of_20_000_texts_makes_a_judge_raise(seed: int) -> None:
    judge_all(5000, seed)


def test_every_value_meets_every_assertion() -> None:
    for run in ASSERTIONS:
        for first in VALUES:
            for second in VALUES[:: 3 if len(first) < 50 else 15]:
                lines = [f'{{"value": {first}}}', f'{{"value": {second}}}']
                (fault,) = run.judge(Outcome("ended", 0, "", "", lines))
                assert isinstance(fault, str)


def test_all_places_of_answers_are_read() -> None:
    assert {"box", "last_number", "pattern", "json", "auto"} == {
        reward.answer_in for reward in REWARDS if isinstance(reward, AnswerReward)
    }
