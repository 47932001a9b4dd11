"""Supervised fine-tuning on demonstrations: their tokens, the loss, the training of a cold start and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.inputs import asked_of, encode_prompts, reader_of
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.tokenizer import end_of_text
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.types import PromptInputs, Rollout, RowInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Example(NamedTuple):
    """A demonstration as tokens."""

    prompt: list[int]
    completion: list[int]
    """The completion with its EOS; of an episode all actions, and the observations between them."""
    written: list[bool]
    """True for the tokens of ``completion`` that the policy has to write."""
    inputs: PromptInputs | None = None
    """What the model reads beside the tokens of the prompt."""


def tokenized(shown: Sequence[Demonstration], dialogue: Dialogue) -> list[Example]:
    """Demonstrations as the tokens that a rollout of their actions would have. The tokenizer is called twice for all
    of them, since a call costs more than the tokens of a short text."""
    inputs: list[PromptInputs | None] = [None] * len(shown)
    if reader_of(dialogue.tokenizer) is None:
        asked = [asked_of(each.question, each.columns, dialogue.tokenizer) for each in shown]
        prompts = dialogue.prompts_ids(asked)
    else:
        problems = [(each.question, each.columns) for each in shown]
        read = encode_prompts(problems, dialogue.template, dialogue.tokenizer)
        prompts, inputs = [prompt.ids for prompt in read], [prompt.inputs for prompt in read]
    for number, each in enumerate(shown):
        if each.tools:  # an agent's
            offered = replace(dialogue, tools=each.tools, told_tools=each.told_tools)
            prompts[number] = offered.prompt_ids(each.question)
    texts = [[each.completion, *(action for _, action in each.further)] for each in shown]
    actions = iter(_actions_ids(list(chain.from_iterable(texts)), dialogue))
    found = []
    for prompt, own_inputs, demonstration in zip(prompts, inputs, shown, strict=True):
        tokens = next(actions)
        written = [True] * len(tokens)
        for observation, _ in demonstration.further:
            for ids, own in ((dialogue.observation_ids(observation, tokens[-1]), False), (next(actions), True)):
                tokens += ids
                written += [own] * len(ids)
        found.append(Example(prompt, tokens, written, own_inputs))
    return found


def _actions_ids(texts: Sequence[str], dialogue: Dialogue) -> list[list[int]]:
    prefill, tokenizer = dialogue.template.prefill, dialogue.tokenizer
    texts = [dialogue.template.without_opened_thought(text, tokenizer) for text in texts]
    if not all(text.startswith(prefill) for text in texts):
        raise ValueError(f"a demonstration does not begin with the template's prefill {prefill!r}.")
    ids = tokenizer([text[len(prefill) :] for text in texts], add_special_tokens=False).input_ids
    return [[*row, *end_of_text(tokenizer)] for row in ids]


def as_rollout(examples: Sequence[Example], *, pad_token_id: int) -> Rollout:
    """Examples as an engine would have given them, whose actions the policy is to write."""
    prompt_ids, prompt_mask = pad_left([each.prompt for each in examples], pad_token_id)  # (B, S)
    ids = [torch.tensor(each.completion) for each in examples]
    completion_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id)  # (B, T)
    return Rollout(
        group_size=1,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in ids], batch_first=True),
        sampling_logprobs=torch.zeros(completion_ids.shape),
        finish_reasons=["stop" for _ in examples],
        action_mask=pad_sequence([torch.tensor(each.written) for each in examples], batch_first=True),
        inputs=_inputs_of(examples),
    )


def _inputs_of(examples: Sequence[Example]) -> RowInputs | None:
    inputs = RowInputs([each.inputs for each in examples])
    return inputs if any(inputs.keys) else None


def demonstration_logprobs(
    model: PreTrainedModel, batch: Sequence[Example], *, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """log π of the tokens of completions, and a mask of those that the policy is to write; both (B, T)."""
    device = model.device
    prompt_ids, prompt_mask = pad_left([each.prompt for each in batch], pad_token_id)  # (B, S)
    ids, own = [torch.tensor(each.completion) for each in batch], [torch.tensor(each.written) for each in batch]
    completion_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id).to(device)  # (B, T)
    completion_mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in ids], batch_first=True).to(device)
    written = pad_sequence(own, batch_first=True).to(device)  # (B, T) bool
    logprobs, _ = completion_logprobs(
        model,
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        inputs=_inputs_of(batch),
        temperature=1.0,
    )
    return logprobs, written
