"""Process supervision: rewards of steps, from offsets in a completion's text to its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.functional.exact_sums import weighted_sum
from grpo_pl.policy.template import PromptTemplate
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
    tokens = [
        ids[:length]
        for ids, length in zip(samples.rollout.completion_ids.tolist(), samples.rollout.lengths.tolist(), strict=True)
    ]
    for row, ids in enumerate(tokens):
        steps: list[tuple[float, int]] = []
        for reward, scores in zip(scored.rewards, scored.scores, strict=True):
            if reward.weight == 0:  # only logged
                continue
            score, weight = scores[row], [reward.weight]
            if score.steps is not None:
                ends = tokens_at(score.steps.ends, ids, template, tokenizer)
                steps += [
                    (weighted_sum([v], [reward.weight]), e) for v, e in zip(score.steps.values, ends, strict=True)
                ]
            elif score.value is not None:
                steps.append((weighted_sum([score.value], weight), len(ids) - 1))
        rows.append(steps)
    width = max(1, *(len(steps) for steps in rows))
    padded = [[v for v, _ in steps] + [torch.nan] * (width - len(steps)) for steps in rows]
    values = torch.tensor(padded, dtype=torch.float64)
    ends_at = torch.tensor([[end for _, end in steps] + [0] * (width - len(steps)) for steps in rows])
    device = samples.rollout.completion_ids.device
    return values.to(device), ends_at.to(device)


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
