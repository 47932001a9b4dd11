"""Sequences of digits: right answers, exact lengths, and two splits that share nothing and lose nothing."""

import random

import pytest

from grpo_pl.data.tasks.sorting import SortingPrompts
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards import SortingReward
from grpo_pl.types import Problem


def test_the_answer_is_the_sorted_question_and_both_are_four_tokens() -> None:
    source, twos = SortingPrompts(), SortingPrompts(symbols=2)  # zeros in front are kept
    tokenizer = character_tokenizer([], "0123456789")
    for prompt in [*source.prompts(3, count=100), *source.validation(50), *twos.prompts(0, count=10)]:
        shown = source.demonstration(prompt, random.Random(0))
        assert shown == "".join(sorted(prompt.question))
        assert len(tokenizer(prompt.question).input_ids) == len(tokenizer(shown).input_ids) == 4


def test_a_tenth_of_all_sequences_is_held_out() -> None:
    source = SortingPrompts()
    problems = (Problem(id=identity, question="", answer="") for identity in range(10_000))
    assert sum(map(source.is_held_out, problems)) == pytest.approx(1000, abs=100)


def test_a_demonstration_earns_every_reward_in_full() -> None:
    source = SortingPrompts()
    prompts = source.prompts(0, count=30)
    shown = [source.demonstration(p, random.Random(0)) for p in prompts]
    for credit in ("distance", "inclusion_order", "inclusion_order_simple"):
        scores = SortingReward(credit=credit)(shown, [p.answer for p in prompts], {})
        assert [s.value for s in scores] == [1.0] * 30
