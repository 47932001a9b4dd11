"""Steps of a completion's text find their tokens, and their values the right advantages."""

from __future__ import annotations

import pytest
import torch

from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards.base import Score, StepScores
from grpo_pl.rewards.batch import ScoredBatch, check_rewards
from grpo_pl.rewards.format import FormatReward
from grpo_pl.rewards.process import ColumnArithmeticReward
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.supervision import step_tensors, tokens_at
from grpo_pl.types import Problem, Rollout

TOKENIZER = character_tokenizer(["<think>", "</think>"])


def samples_of(texts: list[str]) -> Samples:
    rows = [[*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    rollout = Rollout(
        group_size=len(texts),
        prompt_ids=torch.ones(len(texts), 1, dtype=torch.int64),
        prompt_mask=torch.ones(len(texts), 1, dtype=torch.bool),
        completion_ids=ids,
        completion_mask=mask,
        sampling_logprobs=torch.zeros(len(texts), width),
        finish_reasons=["stop"] * len(texts),
    )
    prompt = Problem(id=0, question="1+1=", answer="2")
    return Samples(prompts=[prompt], prompt_texts=["1+1="], rollout=rollout, completions=texts, step=0)


def test_a_step_ends_at_the_token_that_holds_its_last_character() -> None:
    text = "<think>ab\ncd"  # tokens: <think> a b \n c d
    ids = TOKENIZER(text).input_ids
    assert tokens_at([7, 9, 12], ids, PromptTemplate(), TOKENIZER) == [0, 2, 5]


def test_offsets_inside_the_prefill_belong_to_the_first_token() -> None:
    template = PromptTemplate(prefill="<think>")
    ids = TOKENIZER("ab").input_ids
    assert tokens_at([3, 8, 9], ids, template, TOKENIZER) == [0, 0, 1]


def test_step_values_are_weighted_and_rewards_without_steps_end_with_the_completion() -> None:
    process, outcome = ColumnArithmeticReward(weight=2.0), FormatReward(weight=0.5)
    scored = ScoredBatch(
        rewards=[process, outcome],
        scores=[
            [Score(0.5, "wrong", steps=StepScores((1.0, 0.0), (1, 3))), Score(None, "bad_gold")],
            [Score(1.0, "ok"), Score(1.0, "ok")],
        ],
    )
    values, ends = step_tensors(scored, samples_of(["abc", "x"]), PromptTemplate(), TOKENIZER)
    expected = torch.tensor([[2.0, 0.0, 0.5], [0.5, torch.nan, torch.nan]], dtype=torch.float64)
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert ends.tolist() == [[0, 2, 3], [1, 0, 0]]  # the outcome's step ends at the EOS token


def test_a_reward_of_weight_0_is_no_step_and_weighted_values_are_those_on_paper() -> None:
    process, logged = ColumnArithmeticReward(weight=0.1), FormatReward(weight=0.0)
    steps = StepScores((3.0,), (1,))
    scored = ScoredBatch(rewards=[process, logged], scores=[[Score(3.0, "ok", steps=steps)], [Score(1.0, "ok")]])
    values, _ = step_tensors(scored, samples_of(["abc"]), PromptTemplate(), TOKENIZER)
    assert values.tolist() == [[0.3]]  # 0.1 * 3.0 is 0.30000000000000004


def test_process_supervision_without_a_reward_for_steps_is_refused() -> None:
    rewards = [FormatReward(correctness=True)]
    check_rewards(rewards)
    with pytest.raises(ValueError, match="no reward scores steps"):
        check_rewards(rewards, steps_needed=True)
