"""Rewards of parts of a completion: of steps in its text, of turns of an episode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.functional.exact_sums import weighted_sum
from grpo_pl.objective.terms.base import Turns
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rollout.sampler import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def step_tensors(
    scored: ScoredBatch, samples: Samples, template: PromptTemplate, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """Weighted values of all steps and the tokens they end at.

    A reward without steps counts as one more step, which ends with the completion; one of weight 0 does not count.

    Returns:
        values (B, K) float64, NaN where there is no step or its reward is None, and ends (B, K) int64.
    """
    rows: list[list[tuple[float, int]]] = []
    completions = zip(samples.rollout.completion_ids.tolist(), samples.rollout.lengths.tolist(), strict=True)
    for row, (ids, length) in enumerate(completions):
        steps: list[tuple[float, int]] = []
        for reward, scores in zip(scored.rewards, scored.scores, strict=True):
            score = scores[row]
            values: Sequence[float] = ()
            ends: Sequence[int] = ()
            if reward.weight == 0:  # only logged
                continue
            if score.steps is not None:
                values, ends = score.steps.values, tokens_at(score.steps.ends, ids[:length], template, tokenizer)
            elif score.value is not None:
                values, ends = [score.value], [length - 1]
            steps += [(weighted_sum([v], [reward.weight]), end) for v, end in zip(values, ends, strict=True)]
        rows.append(steps)
    width = max(1, *(len(steps) for steps in rows))
    padded = [[v for v, _ in steps] + [torch.nan] * (width - len(steps)) for steps in rows]
    table = torch.tensor(padded, dtype=torch.float64)
    ends_at = torch.tensor([[end for _, end in steps] + [0] * (width - len(steps)) for steps in rows])
    device = samples.rollout.completion_ids.device
    return table.to(device), ends_at.to(device)


def tokens_at(
    ends: Sequence[int], token_ids: Sequence[int], template: PromptTemplate, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """For each offset, the index of the token that holds the character before it.

    A character's token is the first after which the decoded text reaches that far; what lies inside the prefill, which
    the policy did not write, counts as the first token's.
    """

    def reached(token: int) -> int:
        return len(template.completion_text(list(token_ids[: token + 1]), tokenizer))

    return [bisect_left(range(len(token_ids) - 1), end, key=reached) for end in ends]


def turns_of(scored: ScoredBatch, samples: Samples) -> Turns:
    """Rewards of each turn: those of a reward that scores turns, and with the last turn every other reward."""
    device = samples.rollout.completion_ids.device
    assert samples.episodes is not None, "credit of turns without an environment is refused before"
    counts = [len(episode.turns) for episode in samples.episodes]
    shape = len(counts), max(1, *counts)
    rewards = torch.zeros(shape, dtype=torch.float64)
    present, invalid = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    weights = [reward.weight for reward in scored.rewards]
    for row, (count, episode) in enumerate(zip(counts, samples.episodes, strict=True)):
        present[row, :count] = True
        invalid[row, :count] = torch.tensor(episode.invalid_actions, dtype=torch.bool)
        parts = [
            _parts(reward, scores[row], count) for reward, scores in zip(scored.rewards, scored.scores, strict=True)
        ]
        for turn in range(count):
            rewards[row, turn] = weighted_sum([part[turn] for part in parts], weights)
    return Turns(
        rewards=rewards.to(device),
        present=present.to(device),
        invalid_actions=invalid.to(device),
        states=[episode.states for episode in samples.episodes],
        index=samples.rollout.turn_index,
    )


def _parts(reward: Reward, score: Score, count: int) -> Sequence[float]:
    """A reward's share of each of the ``count`` turns; zeros where it has no value."""
    if score.value is None:
        return [0.0] * count
    if score.turns is None:
        return [0.0] * (count - 1) + [score.value]
    if len(score.turns) != count:
        raise ValueError(f"reward {reward.name!r} scored {len(score.turns)} turns of an episode that has {count}.")
    return score.turns
