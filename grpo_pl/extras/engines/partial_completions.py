"""Partial rollouts: completions that grow by a budget of tokens per step and go on in later steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.policy.loading import end_token_ids
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.rollout.engine import Watching, counting_on, generate_request
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.rollout.texts import TextStream
from grpo_pl.types import NO_VERSION, FinishReason, Problem, Rollout, RowInputs, SampleKey, SamplingParams, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RowIndex = tuple[int, int]
"""Index of a group in a list, and of a completion in it."""
_TENSORS = ("tokens", "logprobs", "versions")


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialCompletion:
    """The tokens that a completion has so far, on the CPU."""

    tokens: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int32))  # (n,)
    logprobs: Tensor = field(default_factory=partial(torch.empty, 0))  # (n,) float32, as drawn
    versions: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.int32))
    """(n,), how many updates the policy had had."""
    finish_reason: FinishReason | None = None
    """None while it goes on."""

    def first(self, count: int, finish_reason: FinishReason | None) -> PartialCompletion:
        """Its first tokens, in memory of their own."""
        tensors = {name: getattr(self, name)[:count].clone() for name in _TENSORS}
        return PartialCompletion(**tensors, finish_reason=finish_reason)

    def followed_by(self, more: PartialCompletion) -> PartialCompletion:
        """Both as one, which ends as the second does."""
        tensors: dict[str, Any] = {n: torch.cat([getattr(self, n), getattr(more, n)]) for n in _TENSORS}
        return replace(more, **tensors)


@dataclass(frozen=True, kw_only=True)
class PartialGroup:
    """The completions of one prompt; ``step`` and ``attempt`` are of when it was asked, and name its samples."""

    prompt: Problem
    step: int
    attempt: int
    completions: tuple[PartialCompletion, ...]

    @property
    def whole(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


@dataclass(frozen=True, kw_only=True)
class PartialSampler:
    """Draws completions a part at a time. A token's random number follows from its sample and its position in the whole
    completion, so where a completion was cut does not show, unless the weights have changed meanwhile."""

    sampler: CompletionSampler
    sampling: SamplingParams
    seed: int
    part: int
    """Most tokens that a call adds to a completion."""

    def grow(
        self, model: PreTrainedModel, groups: Sequence[PartialGroup], **watching: Unpack[Watching]
    ) -> dict[RowIndex, PartialCompletion]:
        """Up to ``part`` tokens more of every completion that is not finished, the new ones alone.

        Raises:
            ValueError: a prompt and ``max_completion_length`` do not fit the model's context.
            RolloutInterrupted: ``should_stop`` turned true.
        """
        if not groups:
            return {}
        asked = self.sampler.encoded(model, [group.prompt for group in groups], self.sampling.max_completion_length)
        ends = end_token_ids(model, self.sampler.tokenizer, self.sampling)
        found: dict[RowIndex, PartialCompletion] = {}
        for call in self._calls(groups):
            request = generate_request(
                model,
                self.sampler.tokenizer,
                prompt_ids=[
                    [*asked[g].ids, *groups[g].completions[rows[0]].tokens.tolist()] for g, rows in call.blocks
                ],
                keys=[[self._key(groups[g], row) for row in rows] for g, rows in call.blocks],
                sampling=replace(self.sampling, max_completion_length=call.limit),
                prefix="" if call.drawn else self.sampler.template.prefill,
                inputs=[asked[g].inputs for g, _ in call.blocks],
            )
            tokens = sum(len(part.tokens) for part in found.values())
            finished = sum(part.finish_reason is not None for part in found.values())
            rollout = self.sampler.generate(model, request, **counting_on(watching, tokens, finished))
            for at, (g, row) in enumerate((g, row) for g, rows in call.blocks for row in rows):
                found[g, row] = self._part(groups[g].completions[row], rollout, at, ends)
        return found

    def rollout(self, rows: Sequence[tuple[Problem, PartialCompletion]], group_size: int, device: Any) -> Rollout:
        """The completions so far as one rollout; rows of a prompt are neighbours."""
        sampler, pad = self.sampler, int(self.sampler.tokenizer.pad_token_id)
        asked = [sampler.encode(prompt) for prompt, _ in rows[::group_size]]
        prompt_ids, prompt_mask = pad_left([prompt.ids for prompt in asked for _ in range(group_size)], pad)
        inputs = RowInputs([prompt.inputs for prompt in asked for _ in range(group_size)])

        def stacked(values: Sequence[Tensor], fill: Any, kind: torch.dtype) -> Tensor:
            return pad_sequence([row.to(kind) for row in values], batch_first=True, padding_value=fill).to(device)

        completions = [completion for _, completion in rows]
        return Rollout(
            group_size=group_size,
            prompt_ids=prompt_ids.to(device),
            prompt_mask=prompt_mask.to(device),
            completion_ids=stacked([row.tokens for row in completions], pad, torch.int64),
            completion_mask=stacked([torch.ones_like(row.tokens) for row in completions], 0, torch.bool),
            sampling_logprobs=stacked([row.logprobs for row in completions], 0.0, torch.float32),
            policy_version=stacked([row.versions for row in completions], NO_VERSION, torch.int64),
            finish_reasons=[row.finish_reason or "length" for row in completions],
            inputs=inputs if any(inputs.keys) else None,
        )

    def whole(self, groups: Sequence[PartialGroup], step: int, device: torch.device) -> Samples:
        """The samples of groups that are whole."""
        assert all(group.whole for group in groups), "a group goes on"
        rows = [(group.prompt, completion) for group in groups for completion in group.completions]
        rollout = self.rollout(rows, len(groups[0].completions), device)
        return self.sampler.samples([group.prompt for group in groups], rollout, step)

    def _calls(self, groups: Sequence[PartialGroup]) -> list[_Call]:
        blocks: list[tuple[int, list[int]]] = []
        for g, group in enumerate(groups):
            if not any(len(completion.tokens) for completion in group.completions):
                blocks.append((g, list(range(len(group.completions)))))
                continue
            blocks += [(g, [i]) for i, completion in enumerate(group.completions) if completion.finish_reason is None]
        calls: dict[tuple[int, bool], _Call] = {}
        for g, rows in blocks:
            drawn = len(groups[g].completions[rows[0]].tokens)
            limit = min(self.part, self.sampling.max_completion_length - drawn)
            calls.setdefault((limit, drawn > 0), _Call(limit=limit, drawn=drawn > 0)).blocks.append((g, rows))
        return [calls[kind] for kind in sorted(calls)]

    def _key(self, group: PartialGroup, row: int) -> SampleKey:
        return SampleKey(
            seed=self.seed,
            split="train",
            step=group.step,
            attempt=group.attempt,
            prompt_id=group.prompt.id,
            sample=row,
            drawn=len(group.completions[row].tokens),
        )

    def _part(self, before: PartialCompletion, rollout: Rollout, row: int, ends: Collection[int]) -> PartialCompletion:
        mask = rollout.action_mask[row]
        part = PartialCompletion(
            tokens=rollout.completion_ids[row][mask].to("cpu", torch.int32),
            logprobs=rollout.sampling_logprobs[row][mask].cpu(),
            versions=rollout.policy_version[row][mask].to("cpu", torch.int32),
        )
        stopped = self._stopped(before.tokens, part.tokens) if self.sampling.stop else None
        if stopped is not None:
            return part.first(stopped, "stop")
        if int(part.tokens[-1]) in ends:
            return replace(part, finish_reason="stop")
        length = len(before.tokens) + len(part.tokens)
        return replace(part, finish_reason=None if length < self.sampling.max_completion_length else "length")

    def _stopped(self, before: Tensor, new: Tensor) -> int | None:
        """The number of new tokens up to the one that completes a stop string, which may begin in those before."""
        stops = StopStrings.of(self.sampling, self.sampler.tokenizer, self.sampler.template.prefill)
        assert stops is not None
        window = before[max(0, len(before) - 4 * max(map(len, stops.texts))) :]  # a character has 4 bytes at most
        whole = len(window) == len(before)
        text = TextStream(stops.tokenizer, stops.texts, prefix=stops.prefix if whole else "")
        text.push([*window.tolist(), *new.tolist()])
        return max(1, len(text.tokens) - len(window)) if text.stopped else None


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The rows of one call of the engine; a block is a group that begins, or one row of a group that goes on."""

    limit: int
    drawn: bool
    """True if its rows go on."""
    blocks: list[tuple[int, list[int]]] = field(default_factory=list)


def new_groups(prompts: Sequence[Problem], *, step: int, attempt: int, group_size: int) -> list[PartialGroup]:
    """Groups with empty completions."""
    empty = (PartialCompletion(),) * group_size
    return [PartialGroup(prompt=prompt, step=step, attempt=attempt, completions=empty) for prompt in prompts]


def extended(groups: Sequence[PartialGroup], parts: Mapping[RowIndex, PartialCompletion]) -> list[PartialGroup]:
    """The groups with the tokens that `PartialSampler.grow` has drawn."""
    return [
        replace(
            group,
            completions=tuple(
                row.followed_by(parts[g, i]) if (g, i) in parts else row for i, row in enumerate(group.completions)
            ),
        )
        for g, group in enumerate(groups)
    ]
