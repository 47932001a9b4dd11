"""From questions to completions: keys, texts, columns, and prompts that do not fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.agents import Transition
from grpo_pl.extras.agents.episode_rows import Episode, Turn
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.types import NO_VERSION, GenerateRequest, Problem, Rollout, SampleKey, SamplingParams

PROMPTS = [
    Problem(id=7, question="7+5=", answer="12", columns={"level": 1}),
    Problem(id=8, question="1+1+1=", answer="3", columns={"author": "me"}),
]
SHORT = SamplingParams(max_completion_length=6)


@pytest.fixture
def sampler(tokenizer: PreTrainedTokenizerBase) -> CompletionSampler:
    return CompletionSampler(engine=PlainEngine(), template=PromptTemplate(prefill="<think>"), tokenizer=tokenizer)


@pytest.fixture
def sample(sampler: CompletionSampler, tiny_policy: PreTrainedModel) -> Callable[..., Samples]:
    """Two short completions of each of ``PROMPTS``, unless told otherwise."""
    asked: dict[str, Any] = {"group_size": 2, "sampling": SHORT, "seed": 0, "split": "train"}
    return lambda prompts=PROMPTS, **how: sampler.sample(tiny_policy, prompts, **{**asked, **how})


@dataclass
class Listening(RolloutEngine):
    """Remembers the request before it passes it on."""

    request: GenerateRequest | None = None

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **told: Any) -> Rollout:
        self.request = request
        return PlainEngine().generate(model, request, **told)


def test_rows_of_a_prompt_are_neighbours_and_texts_are_its_tokens(
    sample: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    samples = sample(group_size=3, step=4)
    assert [prompt.id for prompt in samples.per_row] == [7, 7, 7, 8, 8, 8]
    assert samples.prompt_texts == ["7+5=<think>", "1+1+1=<think>"]
    assert samples.step == 4
    rollout = samples.rollout
    for row, text in enumerate(samples.completions):
        tokens = rollout.completion_ids[row][rollout.completion_mask[row]].tolist()
        assert text == "<think>" + tokenizer.decode(tokens, skip_special_tokens=True)
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
        assert tokenizer.decode(prompt) == samples.prompt_texts[row // 3]


def test_a_sample_is_drawn_alone_by_its_number(sample: Any) -> None:
    group = sample(group_size=3)
    for number in range(3):
        assert sample(group_size=1, first=number).completions == group.completions[number::3]


@pytest.mark.parametrize(("taken", "version"), [(None, 7), (5, 5)])
def test_each_token_says_how_often_the_policy_had_been_updated(
    sample: Any, sampler: CompletionSampler, taken: int | None, version: int
) -> None:
    """Of an engine that reads the live weights, and of one whose copy is older."""
    sampler.engine.updates, sampler.engine.weights_version = 7, taken
    rollout = sample().rollout
    assert (rollout.policy_version[rollout.action_mask] == version).all()
    assert (rollout.policy_version[~rollout.action_mask] == NO_VERSION).all()


def test_columns_are_as_long_as_the_rows_and_a_missing_one_is_none(sample: Any) -> None:
    samples = sample()
    columns = samples.columns()
    expected = {
        "level": [1, 1, None, None],
        "author": [None, None, "me", "me"],
        "prompt": ["7+5=<think>"] * 2 + ["1+1+1=<think>"] * 2,
        "question": ["7+5="] * 2 + ["1+1+1="] * 2,
        "completion_length": samples.rollout.completion_mask.sum(1).tolist(),
    }
    assert {name: columns[name] for name in expected} == expected
    assert {len(column) for column in columns.values()} == {4}


def test_tokens_are_a_column_only_where_a_reward_needs_them(sample: Any) -> None:
    samples = sample()
    assert "completion_ids" not in samples.columns()
    drawn = samples.columns({"completion_ids"})["completion_ids"]
    rollout = samples.rollout
    assert drawn == [
        row[mask].tolist() for row, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)
    ]


@pytest.mark.parametrize(("part", "expected"), [("", "book"), ("sums", "sums")])
def test_a_column_named_source_is_kept_unless_the_problem_is_of_a_mixture(
    sample: Any, part: str, expected: str
) -> None:
    prompt = Problem(id=1, question="1+1=", answer="2", columns={"source": "book"}, source=part)
    samples = sample([prompt])
    assert samples.columns()["source"] == [expected, expected]


def test_keys_name_seed_split_step_attempt_prompt_and_sample(
    tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = Listening()
    sampler = CompletionSampler(engine=engine, template=PromptTemplate(), tokenizer=tokenizer)
    sampler.sample(tiny_policy, PROMPTS, group_size=2, sampling=SHORT, seed=5, split="val", step=3, attempt=1)
    assert engine.request == GenerateRequest(
        prompt_ids=[tokenizer(prompt.question).input_ids for prompt in PROMPTS],
        keys=[
            [SampleKey(seed=5, split="val", step=3, attempt=1, prompt_id=p, sample=g) for g in (0, 1)] for p in (7, 8)
        ],
        sampling=SHORT,
        eos_token_ids=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )


def test_a_prompt_that_does_not_fit_the_context_is_one_clear_error(sample: Any) -> None:
    fits = SamplingParams(max_completion_length=48 - 7)  # 6 characters and <think>
    sample(group_size=1, sampling=fits)
    too_long = SamplingParams(max_completion_length=48 - 6)
    with pytest.raises(ValueError, match=r"prompt 8 has 7 tokens; with max_completion_length=42 .* context of 48"):
        sample(group_size=1, sampling=too_long)


def test_sampling_leaves_the_global_generator_and_the_mode_alone(sample: Any, tiny_policy: PreTrainedModel) -> None:
    before = torch.get_rng_state()
    tiny_policy.train()
    sample()
    assert torch.equal(torch.get_rng_state(), before)
    assert tiny_policy.training


def test_the_prompt_of_a_group_is_that_of_an_episode_with_turns(sample: Any, sampler: CompletionSampler) -> None:
    """One that failed at its reset has no prompt where the environment writes it."""
    rollout = sample().rollout
    mask = rollout.prompt_mask.clone()
    mask[0] = False
    turn = Turn(action="12", finish_reason="stop", transition=Transition(terminated=True))
    episodes = [Episode(start=Transition(), turns=turns, finish_reason="stop") for turns in [(), (turn,)] * 2]
    samples = sampler._episode_samples(PROMPTS, replace(rollout, prompt_mask=mask), episodes, 0)
    assert samples.prompt_texts == ["7+5=<think>", "1+1+1=<think>"]
