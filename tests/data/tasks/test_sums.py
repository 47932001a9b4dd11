"""Sums for a policy with a calculator."""

import random
from collections import Counter

import pytest

from grpo_pl.data.tasks.sums import SumPrompts
from grpo_pl.extras.agents import play
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment
from grpo_pl.rewards import MathReward


def test_the_answer_is_the_sum_and_the_number_is_its_own() -> None:
    problems = SumPrompts().prompts(0, count=300)
    assert len({p.id for p in problems}) == len({p.question for p in problems}) == 300
    for problem in problems:
        terms = problem.question.removesuffix("=").split("+")
        assert [len(term) for term in terms] == [3, 3, 3] and int(problem.answer) == sum(map(int, terms))


def test_demonstrations_call_the_tool_as_often_as_they_should_and_are_right() -> None:
    source, rng = SumPrompts(tool_share=0.25), random.Random(0)
    calls = Counter(len(source.demonstrated_actions(p, rng)) for p in source.prompts(0, count=400))
    assert calls[2] / 400 == pytest.approx(0.25, abs=0.07) and set(calls) == {1, 2}


def test_a_demonstration_played_with_the_tool_earns_the_reward() -> None:
    source, reward = SumPrompts(tool_share=1.0), MathReward()
    environment = ToolEnvironment(tools=["grpo_pl.extras.agents.calculator:calc"], parser=TagCalls(), workers=1)
    try:
        for problem in source.prompts(0, count=4):
            actions = source.demonstrated_actions(problem, random.Random(0))
            turns = play(environment, actions, row={"question": problem.question})
            assert turns[1].observation == f"<result>{problem.answer}</result>" and turns[-1].terminated
            (score,) = reward([actions[-1]], [problem.answer], {})
            assert score.value == 1.0
    finally:
        environment.shutdown()
        reward.close()
