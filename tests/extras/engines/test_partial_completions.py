"""Completions that grow a part at a time: the same as whole ones, whatever cut them, and with the age of each token."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.engines.partial_completions import PartialSampler, extended, new_groups
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.types import Problem, SamplingParams
from tests.rollout.drawn import assert_same

PROMPTS = [Problem(id=7, question="7+5=", answer="12"), Problem(id=8, question="1+1+1=", answer="3")]
SAMPLING = SamplingParams(max_completion_length=11, stop_token_ids=tuple(range(10, 30)))  # a fifth of the vocabulary


@dataclass(frozen=True)
class Drawing:
    """The same completions in parts and whole."""

    sampler: CompletionSampler
    model: PreTrainedModel

    def partial(self, part: int = 4, sampling: SamplingParams = SAMPLING) -> PartialSampler:
        return PartialSampler(sampler=self.sampler, sampling=sampling, seed=0, part=part)

    def in_parts(self, part: int = 4, sampling: SamplingParams = SAMPLING) -> tuple[Samples, int]:
        """The samples, and how many calls they took."""
        partial = self.partial(part, sampling)
        groups, calls = new_groups(PROMPTS, step=4, attempt=1, group_size=6), 0
        while not all(group.whole for group in groups):
            self.sampler.engine.updates = calls
            groups = extended(groups, partial.grow(self.model, groups))
            calls += 1
        return partial.whole(groups, 4, torch.device("cpu")), calls

    def whole(self, sampling: SamplingParams = SAMPLING) -> Samples:
        how: dict[str, Any] = {"group_size": 6, "seed": 0, "split": "train", "step": 4, "attempt": 1}
        return self.sampler.sample(self.model, PROMPTS, sampling=sampling, **how)

    def assert_same(self, sampling: SamplingParams) -> Samples:
        found, expected = self.in_parts(4, sampling)[0], self.whole(sampling)
        assert found.completions == expected.completions
        assert found.rollout.finish_reasons == expected.rollout.finish_reasons
        return expected


@pytest.fixture
def drawing(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Drawing:
    template = PromptTemplate(prefill="<think>")
    return Drawing(CompletionSampler(engine=NativeEngine(), template=template, tokenizer=tokenizer), tiny_policy)


@pytest.mark.parametrize("part", [1, 4, 11, 50])
def test_parts_are_those_of_the_whole_completion(drawing: Drawing, part: int) -> None:
    (samples, calls), expected = drawing.in_parts(part), drawing.whole()
    assert calls == -(-int(expected.rollout.lengths.max()) // part)
    assert_same(samples.rollout, expected.rollout, atol=1e-5, but=("policy_version",))
    assert (samples.completions, samples.prompt_texts) == (expected.completions, expected.prompt_texts)
    position = torch.arange(samples.rollout.completion_ids.shape[1]).expand_as(samples.rollout.completion_ids)
    mask = samples.rollout.action_mask
    assert torch.equal(samples.rollout.policy_version, torch.where(mask, position // part, -1))


def test_a_stop_string_across_parts_ends_the_completion(drawing: Drawing) -> None:
    texts = [text.removeprefix("<think>") for text in drawing.whole().completions]
    stop = next(text[3:5] for text in texts if len(text) > 6)  # characters are tokens: parts of 4 cut it in two
    expected = drawing.assert_same(replace(SAMPLING, stop=(stop,)))
    assert any(stop in text for text in expected.completions)


def test_a_stop_string_counts_only_where_it_stands_in_the_completion(drawing: Drawing) -> None:
    """The end of the prefill does not stand before a later part."""
    text = max((t.removeprefix("<think>") for t in drawing.whole().completions), key=len)
    # with the prefill's last character it would be found at the beginning of the second part
    drawing.assert_same(replace(SAMPLING, stop=(">" + text[4],)))


def test_only_what_is_not_finished_is_drawn_again_and_counted(drawing: Drawing) -> None:
    partial = drawing.partial()
    groups = new_groups(PROMPTS, step=0, attempt=0, group_size=6)
    first = extended(groups, partial.grow(drawing.model, groups))
    open_ = {
        (g, i) for g, group in enumerate(first) for i, row in enumerate(group.completions) if not row.finish_reason
    }
    assert 0 < len(open_) < 12, "nothing ended in the first part, or everything"
    told: list[tuple[int, int]] = []
    second = partial.grow(drawing.model, first, progress=lambda *counts: told.append(counts))
    assert second.keys() == open_
    tokens = sum(len(part.tokens) for part in second.values())
    assert told[-1] == (tokens, len(open_))  # this part of them is done


def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_drawn(drawing: Drawing) -> None:
    partial = drawing.partial(4, SamplingParams(max_completion_length=10_000))
    with pytest.raises(ValueError, match=r"prompt 8 has .* exceeds the model's context"):
        partial.grow(drawing.model, new_groups(PROMPTS, step=0, attempt=0, group_size=2))


def test_a_part_can_be_interrupted(drawing: Drawing) -> None:
    groups = new_groups(PROMPTS, step=0, attempt=0, group_size=2)
    with pytest.raises(RolloutInterrupted):
        drawing.partial().grow(drawing.model, groups, should_stop=lambda: True)
