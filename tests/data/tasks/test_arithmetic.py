"""Made-up sums: what may be asked, what is held out, and whether the written-out calculation is right."""

import itertools
import random
import re
from typing import Any

import pytest

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts, scratchpad
from grpo_pl.types import Problem


def _value(prompt: Problem) -> int:
    a, operator, b = re.fullmatch(r"(\d+)([+-])(\d+)=", prompt.question).groups()
    return int(a) + int(b) if operator == "+" else int(a) - int(b)


@pytest.mark.parametrize("operators", ["+", "-", "+-"])
def test_answers_are_right(operators: str) -> None:
    source = ArithmeticPrompts(digits=4, operators=operators)
    for prompt in [*source.prompts(3, count=200), *source.validation(100)]:
        assert int(prompt.answer) == _value(prompt) >= 0


@pytest.mark.parametrize(("difficulty", "carries"), [("carry", {True}), ("no_carry", {False}), ("any", {True, False})])
def test_difficulty_chooses_by_carry(difficulty: Any, carries: set[bool]) -> None:
    prompts = ArithmeticPrompts(digits=2, operators="+", difficulty=difficulty).prompts(0, count=60)
    found = set()
    for prompt in prompts:
        a, b = (int(n) for n in prompt.question.rstrip("=").split("+"))
        found.add(a % 10 + b % 10 >= 10 or a // 10 + b // 10 >= 10)
    assert found == carries


def test_operands_have_the_digits_asked_for() -> None:
    for prompt in ArithmeticPrompts(digits=4, min_digits=3, operators="+-").prompts(0, count=100):
        assert all(len(n) in (3, 4) for n in re.findall(r"\d+", prompt.question))


def test_scratchpads_written_by_hand() -> None:
    assert scratchpad(347, "+", 285) == ["7+5+0=12", "4+8+1=13", "3+2+1=6"]
    assert scratchpad(5, "+", 95) == ["5+5+0=10", "0+9+1=10"]
    assert scratchpad(402, "-", 85) == ["2-5-0=7", "0-8-1=1", "4-0-1=3"]


@pytest.mark.parametrize("operator", ["+", "-"])
def test_every_line_of_every_scratchpad_is_true_and_the_digits_spell_the_answer(operator: str) -> None:
    rng = random.Random(0)
    pairs = [
        *itertools.product(range(0, 100, 3), range(0, 100, 7)),
        *((rng.randrange(10**6), rng.randrange(10**6)) for _ in range(300)),
    ]
    for pair in pairs:
        a, b = sorted(pair, reverse=True) if operator == "-" else pair
        total, carry = 0, 0
        lines = scratchpad(a, operator, b)
        for place, line in enumerate(lines):
            x, y, c, result = map(int, re.fullmatch(r"(\d)[+-](\d)[+-](\d)=(\d+)", line).groups())
            assert (x, y, c) == (a // 10**place % 10, b // 10**place % 10, carry)
            exact = x + y + c if operator == "+" else x - y - c
            carry = int(exact >= 10 if operator == "+" else exact < 0)
            assert result == (exact if operator == "+" else exact % 10)  # a borrowed ten is added
            total += result % 10 * 10**place
        if operator == "+":
            total += carry * 10 ** len(lines)
        else:
            assert carry == 0
        assert total == (a + b if operator == "+" else a - b)


def test_demonstration_holds_the_work_the_tags_and_the_boxed_answer() -> None:
    prompt = Problem(id=1, question="47+85=", answer="132")
    always, never = ArithmeticPrompts(scratchpad_share=1.0), ArithmeticPrompts(scratchpad_share=0.0)
    rng = random.Random(0)
    assert always.demonstration(prompt, rng) == ("<think>7+5+0=12\n4+8+1=13\n</think><answer>\\boxed{132}</answer>")
    assert never.demonstration(prompt, rng) == "<think></think><answer>\\boxed{132}</answer>"


def test_a_prompt_does_not_carry_its_demonstration() -> None:
    assert ArithmeticPrompts(digits=2).prompts(0, count=1)[0].columns == {}


def test_scratchpad_share_is_the_share_of_demonstrations_with_work() -> None:
    source, rng = ArithmeticPrompts(scratchpad_share=0.25), random.Random(1)
    prompts = ArithmeticPrompts(digits=3).prompts(0, count=2000)
    written = sum("=" in str(source.demonstration(prompt, rng)) for prompt in prompts)
    assert abs(written / 2000 - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5  # four standard errors


def test_the_solution_is_a_column_where_it_is_asked_for() -> None:
    (problem,) = ArithmeticPrompts(digits=2, min_digits=2, solutions=True).prompts(0, count=1)
    a, b = map(int, problem.question.rstrip("=").split("+"))
    assert problem.columns == {"solution": "\n".join([*scratchpad(a, "+", b), problem.answer])}
    (plain,) = ArithmeticPrompts(digits=2, min_digits=2).prompts(0, count=1)
    assert plain.columns == {} and (plain.id, plain.question) == (problem.id, problem.question)
