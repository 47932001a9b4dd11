"""One-line functions: careful demonstrations pass the tests, careless ones where no bracket is needed."""

import random

import pytest

from grpo_pl.data.tasks.one_liners import OneLinerPrompts
from grpo_pl.rewards import CodeReward


def test_a_careful_demonstration_passes_and_a_careless_one_where_no_bracket_is_needed() -> None:
    problems = OneLinerPrompts().prompts(0, count=12)
    careful, careless = (
        [OneLinerPrompts(careless_share=share).demonstration(p, random.Random(0)) for p in problems] for share in (0, 1)
    )
    reward = CodeReward(isolation="available")
    try:
        reward.check()
    except ValueError as refusal:
        pytest.skip(str(refusal))
    answers = [p.answer for p in problems] * 2
    values = [score.value for score in reward([*careful, *careless], answers, {})]
    reward.close()
    assert values == [1.0] * 12 + [0.0 if "(x" in text.partition("return ")[2] else 1.0 for text in careful]
    assert 0 < sum(values[12:]) < 12  # type: ignore[arg-type]


def test_the_question_says_what_the_brackets_are_for() -> None:
    source = OneLinerPrompts(operations=4, careless_share=0)
    for problem in source.prompts(3, count=50):
        program = source.demonstration(problem, random.Random(0))
        assert program.startswith("```python\ndef f(x): return ") and program.endswith("\n```")
        words = problem.question.split(", ")
        assert [int(word.split()[1]) for word in words] == [
            int(c) for c in program.partition("return")[2] if c.isdigit()
        ]
        body = program.partition("return ")[2].removesuffix("\n```")
        assert f"assert f(7) == {eval(body, {'x': 7})}" in problem.answer
