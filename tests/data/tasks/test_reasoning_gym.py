"""Problems of reasoning-gym: pure functions of the step, splits apart, clear mistakes."""

import random

import pytest

pytest.importorskip("reasoning_gym")

from grpo_pl.data.tasks.reasoning_gym import COLUMN, ReasoningGymPrompts
from grpo_pl.rewards.sandbox.gym_entry import unpack


def test_the_problems_of_a_cold_start_are_never_asked_by_a_rollout() -> None:
    source = ReasoningGymPrompts(task="chain_sum", settings={"max_terms": 3}, demonstrated_share=0.5)
    shown = {p.question for step in range(-5, 0) for p in source.prompts(step, count=8)}
    asked = {p.question for step in range(5) for p in source.prompts(step, count=8)}
    assert shown and asked and not shown & asked
    for share in (0.0, 1.5):
        wrong = ReasoningGymPrompts(task="chain_sum", settings={"max_terms": 3}, demonstrated_share=share)
        with pytest.raises(ValueError, match=r"needs demonstrated_share in \(0, 1\], got"):
            wrong.prompts(0, count=1)


def test_entries_without_an_answer_are_left_out() -> None:
    source = ReasoningGymPrompts(task="base_conversion", settings={"max_value": 20})  # 0 has no digits there
    assert all(p.answer for p in source.prompts(0, count=100))


def test_the_entry_travels_with_the_prompt() -> None:
    (prompt,) = ReasoningGymPrompts(task="countdown", settings={"min_numbers": 3, "max_numbers": 3}).prompts(0, count=1)
    task, settings, entry = unpack(prompt.columns[COLUMN])
    assert (task, settings) == ("countdown", {"min_numbers": 3, "max_numbers": 3})
    assert (entry["question"], entry["answer"]) == (prompt.question, prompt.answer)
    assert len(entry["metadata"]["numbers"]) == 3


def test_a_demonstration_gives_the_answer_alone() -> None:
    source = ReasoningGymPrompts(task="chain_sum")
    (prompt,) = source.prompts(0, count=1)
    shown = source.demonstration(prompt, random.Random(0))
    assert shown == f"<think></think><answer>\\boxed{{{prompt.answer}}}</answer>"


def test_mistakes_are_one_clear_error() -> None:
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
        ReasoningGymPrompts(task="chain_sums")
    with pytest.raises(ValueError, match=r"refuses the settings .*min_term.*settings: .*min_terms"):
        ReasoningGymPrompts(task="chain_sum", settings={"min_term": 2})
    with pytest.raises(ValueError, match=r"refuses the settings"):
        ReasoningGymPrompts(task="chain_sum", settings={"min_terms": 5, "max_terms": 2})
    tiny = ReasoningGymPrompts(task="gcd", settings={"min_value": 1, "max_value": 3})
    with pytest.raises(ValueError, match=r"only \d+ different train problems found .* of 'gcd'"):
        tiny.prompts(0, count=20)
