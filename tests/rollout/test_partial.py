"""Completions that grow a part at a time: the same as whole ones, whatever cut them, and with the age of each token."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.partial import PartialGroup, PartialSampler, extended, new_groups
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.types import Problem, SamplingParams

PROMPTS = [Problem(id=7, question="7+5=", answer="12"), Problem(id=8, question="1+1+1=", answer="3")]
SAMPLING = SamplingParams(max_completion_length=11, stop_token_ids=tuple(range(10, 30)))  # a fifth of the vocabulary


@pytest.fixture
def sampler(tokenizer: PreTrainedTokenizerBase) -> CompletionSampler:
    return CompletionSampler(engine=NativeEngine(), template=PromptTemplate(prefill="<think>"), tokenizer=tokenizer)


def in_parts(
    sampler: CompletionSampler, model: PreTrainedModel, part: int, sampling: SamplingParams = SAMPLING
) -> tuple[list[PartialGroup], int]:
    """The groups once they are whole, and how many calls that took."""
    partial = PartialSampler(sampler=sampler, sampling=sampling, seed=0, part=part)
    groups, calls = new_groups(PROMPTS, step=4, attempt=1, group_size=6), 0
    while not all(group.whole for group in groups):
        sampler.engine.updates = calls
        groups = extended(groups, partial.grow(model, groups))
        calls += 1
    return groups, calls


def whole(sampler: CompletionSampler, model: PreTrainedModel, sampling: SamplingParams = SAMPLING) -> Samples:
    return sampler.sample(model, PROMPTS, group_size=6, sampling=sampling, seed=0, split="train", step=4, attempt=1)


@pytest.mark.parametrize("part", [1, 4, 11, 50])
def test_parts_are_those_of_the_whole_completion(
    sampler: CompletionSampler, tiny_policy: PreTrainedModel, part: int
) -> None:
    expected = whole(sampler, tiny_policy)
    groups, calls = in_parts(sampler, tiny_policy, part)
    assert calls == -(-int(expected.rollout.lengths.max()) // part)
    samples = PartialSampler(sampler=sampler, sampling=SAMPLING, seed=0, part=part).whole(
        groups, 4, torch.device("cpu")
    )
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "action_mask", "turn_index"):
        assert torch.equal(getattr(samples.rollout, name), getattr(expected.rollout, name)), name
    torch.testing.assert_close(samples.rollout.sampling_logprobs, expected.rollout.sampling_logprobs)
    assert samples.rollout.finish_reasons == expected.rollout.finish_reasons
    assert (samples.completions, samples.prompt_texts) == (expected.completions, expected.prompt_texts)
    position = torch.arange(samples.rollout.completion_ids.shape[1]).expand_as(samples.rollout.completion_ids)
    mask = samples.rollout.action_mask
    assert torch.equal(samples.rollout.policy_version, torch.where(mask, position // part, -1))


def test_a_stop_string_across_parts_ends_the_completion(
    sampler: CompletionSampler, tiny_policy: PreTrainedModel
) -> None:
    texts = [text.removeprefix("<think>") for text in whole(sampler, tiny_policy).completions]
    stop = next(text[3:5] for text in texts if len(text) > 6)  # characters are tokens: parts of 4 cut it in two
    sampling = replace(SAMPLING, stop=(stop,))
    expected = whole(sampler, tiny_policy, sampling)
    assert any(stop in text for text in expected.completions)
    groups, _ = in_parts(sampler, tiny_policy, 4, sampling)
    partial = PartialSampler(sampler=sampler, sampling=sampling, seed=0, part=4)
    samples = partial.whole(groups, 4, torch.device("cpu"))
    assert samples.completions == expected.completions
    assert samples.rollout.finish_reasons == expected.rollout.finish_reasons


def test_a_stop_string_counts_only_where_it_stands_in_the_completion(
    sampler: CompletionSampler, tiny_policy: PreTrainedModel
) -> None:
    """The end of the prefill does not stand before a later part."""
    text = max((t.removeprefix("<think>") for t in whole(sampler, tiny_policy).completions), key=len)
    stop = ">" + text[4]  # with the prefill's last character it would be found at the beginning of the second part
    sampling = replace(SAMPLING, stop=(stop,))
    expected = whole(sampler, tiny_policy, sampling)
    groups, _ = in_parts(sampler, tiny_policy, 4, sampling)
    samples = PartialSampler(sampler=sampler, sampling=sampling, seed=0, part=4).whole(groups, 4, torch.device("cpu"))
    assert samples.completions == expected.completions
    assert samples.rollout.finish_reasons == expected.rollout.finish_reasons


def test_only_what_is_not_finished_is_drawn_again_and_counted(
    sampler: CompletionSampler, tiny_policy: PreTrainedModel
) -> None:
    partial = PartialSampler(sampler=sampler, sampling=SAMPLING, seed=0, part=4)
    groups = new_groups(PROMPTS, step=0, attempt=0, group_size=6)
    first = extended(groups, partial.grow(tiny_policy, groups))
    open_ = {
        (g, i) for g, group in enumerate(first) for i, row in enumerate(group.completions) if not row.finish_reason
    }
    assert 0 < len(open_) < 12, "nothing ended in the first part, or everything"
    told: list[tuple[int, int]] = []
    second = partial.grow(tiny_policy, first, progress=lambda *counts: told.append(counts))
    assert second.keys() == open_
    tokens = sum(len(part.tokens) for part in second.values())
    assert told[-1] == (tokens, len(open_))  # this part of them is done


def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_drawn(
    sampler: CompletionSampler, tiny_policy: PreTrainedModel
) -> None:
    partial = PartialSampler(sampler=sampler, sampling=SamplingParams(max_completion_length=10_000), seed=0, part=4)
    with pytest.raises(ValueError, match=r"prompt 8 has .* exceeds the model's context"):
        partial.grow(tiny_policy, new_groups(PROMPTS, step=0, attempt=0, group_size=2))


def test_a_part_can_be_interrupted(sampler: CompletionSampler, tiny_policy: PreTrainedModel) -> None:
    partial = PartialSampler(sampler=sampler, sampling=SAMPLING, seed=0, part=4)
    with pytest.raises(RolloutInterrupted):
        partial.grow(tiny_policy, new_groups(PROMPTS, step=0, attempt=0, group_size=2), should_stop=lambda: True)
