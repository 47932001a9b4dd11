"""The loss of samples that have several segments: each counts once, whatever it consists of."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.echo import ECHO
from grpo_pl.training.experience import Experience
from tests import gradient_step

LONGEST = 10
SAMPLES = [  # (prompt, what follows, which of it the policy wrote) of each segment
    [([3, 4, 5], [6, 7, 8], [1, 0, 1]), ([9, 2], [1, 4, 6, 3], [1, 1, 1, 1])],
    [([3, 4, 5], [2, 2], [1, 1])],
]
REWARDS = [1.0, 0.0]


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    return gradient_step.qwen(vocab_size=12, initializer_range=0.4).double()


def _experience(algorithm: GRPOAlgorithm, old: list[Tensor] | None = None) -> Experience:
    rows, index, written = [], [], []
    for segments in SAMPLES:
        shown = [prompt if number else [] for number, (prompt, _, _) in enumerate(segments)]
        parts = list(zip(range(len(segments)), shown, segments, strict=True))
        rows.append([token for _, prompt, (_, ids, _) in parts for token in prompt + ids])
        index.append([k for n, prompt, (_, ids, _) in parts for k in [-n] * len(prompt) + [n] * len(ids)])
        written.append([w for _, prompt, (_, _, own) in parts for w in [0] * len(prompt) + own])
    segment_index, action_mask = (pad_sequence(list(map(torch.tensor, table)), True) for table in (index, written))
    rollout = gradient_step.rollout_of([segments[0][0] for segments in SAMPLES], rows)
    rollout = replace(rollout, action_mask=action_mask.bool(), segment_index=segment_index)
    before = None
    if old is not None:
        zeros = torch.zeros(rollout.action_mask.shape, dtype=torch.float64)
        before = zeros.masked_scatter(rollout.action_mask, torch.cat(old))
    values = torch.tensor([REWARDS], dtype=torch.float64)
    return gradient_step.experience_of(rollout, algorithm, values, longest=LONGEST, old_logprobs=before)


def _scored(policy: PreTrainedModel, prompt: list[int], ids: list[int]) -> Tensor:
    """Log-probabilities of what follows a prompt, alone in a forward pass."""
    logits = policy(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), ids]


def _drawn(policy: PreTrainedModel) -> list[Tensor]:
    """Of each sample, the log-probabilities of all tokens that the policy wrote."""
    return [
        torch.cat([_scored(policy, prompt, ids)[torch.tensor(own).bool()] for prompt, ids, own in segments])
        for segments in SAMPLES
    ]


ADVANTAGE = 0.5  # 1 and 0 less their mean
DIVISORS = {
    "sequence_mean": (2 * 6, 2 * 2),
    "token_mean": (8, 8),
    "constant": (2 * LONGEST,) * 2,
    "sequence_sum": (2, 2),
}
"""What each token's term is divided by, in the sample of 2 + 4 drawn tokens and in that of 2."""


@pytest.mark.parametrize("max_tokens", [12, 1000])
@pytest.mark.parametrize("aggregation", DIVISORS)
def test_the_tokens_of_all_segments_are_those_of_one_sample(
    policy: PreTrainedModel, aggregation: Any, max_tokens: int
) -> None:
    algorithm = GRPOAlgorithm(group_size=2, beta=0.0, scale="none", aggregation=aggregation)
    first, second = _drawn(policy)
    divisors = DIVISORS[aggregation]
    surrogate = ADVANTAGE * (first - first.detach()).exp().sum() / divisors[0]
    surrogate = surrogate - ADVANTAGE * (second - second.detach()).exp().sum() / divisors[1]
    moved, result = gradient_step.moved(
        policy, _experience(algorithm), algorithm, longest=LONGEST, max_tokens=max_tokens
    )
    expected = gradient_step.gradient(surrogate, policy)
    assert gradient_step.relative(moved, expected) < 1e-6
    assert result.losses == pytest.approx([-surrogate.item()], abs=1e-7)
    assert {int(count) for _, count in result.sums.values()} == {8}


def test_the_ratio_of_a_sequence_is_that_of_all_segments(policy: PreTrainedModel) -> None:
    """GSPO: one ratio of the six tokens of the first sample, clipped as one."""
    algorithm = GRPOAlgorithm(
        group_size=2,
        beta=0.0,
        scale="none",
        ratio_level="sequence",
        epsilon_low=0.05,
        epsilon_high=0.2,
    )
    drawn = _drawn(policy)
    old = [drawn[0].detach() - torch.tensor([0.5, -0.3, 0.1, 0.2, -0.1, 0.2]), drawn[1].detach() + 0.2]
    means = [(now - before).mean().exp() for now, before in zip(drawn, old, strict=True)]
    assert 1.05 < means[0] < 1.2 and means[1] < 0.95  # the second is clipped, and has no gradient
    surrogate = ADVANTAGE * (means[0] - 0.95) / 2
    moved, result = gradient_step.moved(policy, _experience(algorithm, old), algorithm, longest=LONGEST)
    expected = gradient_step.gradient(surrogate, policy)
    assert gradient_step.relative(moved, expected) < 1e-6
    assert result.losses == pytest.approx([-surrogate.item()], abs=1e-6)


def test_the_prompts_of_segments_are_no_observations(policy: PreTrainedModel) -> None:
    algorithm = GRPOAlgorithm(group_size=2, beta=0.0, scale="none", terms={"echo": ECHO(coef=0.1)})
    experience = _experience(algorithm)
    assert experience.observed is not None and experience.observed.tolist() == [[1, 0]]
    _, result = gradient_step.moved(policy, experience, algorithm, longest=LONGEST)
    surprise, count = result.sums["observation/nll"]
    assert float(surprise) == pytest.approx(-_scored(policy, [3, 4, 5], [6, 7, 8])[1].item()) and int(count) == 1
