"""Rewards to advantages: figures worked out by hand, properties, and what is refused."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_pl.functional.advantages import (
    combine_rewards,
    informative_groups,
    keep_best,
    normalize_each_reward,
    overlong_penalty,
    process_advantages,
    rescale,
    reweighed,
    subtract_baseline,
)

NAN = math.nan


def advantages(
    rewards, *, baseline="group_mean", scale="group_std", ddof=1, eps=1e-5, valid=None, lengths=None, greedy=None
):
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else torch.as_tensor(valid)
    lengths = torch.ones_like(rewards, dtype=torch.int64) if lengths is None else torch.as_tensor(lengths)
    greedy = None if greedy is None else torch.as_tensor(greedy, dtype=torch.float64)
    centred = subtract_baseline(rewards, valid, baseline=baseline, greedy=greedy)
    return rescale(centred, rewards, valid, lengths, scale=scale, ddof=ddof, eps=eps)


# --- figures ------------------------------------------------------------------------------------------------
# Some write-ups print 2.0468, 1.2905 / 5.0, -0.45 / 1.38, -0.55 for the first two rows: those do not follow from
# (r - mean) / (std + 1e-5) with any choice of ddof. The figures below do.


@pytest.mark.parametrize(
    ("rewards", "how", "expected"),
    [
        ([1, 0, 0, 0, 0, 0], {}, [2.0412] + [-0.4082] * 5),
        ([1, 0, 0, 0, 1, 0], {}, [1.2910, -0.6455, -0.6455, -0.6455, 1.2910, -0.6455]),
        ([1, 1, 1, 1, 0, 0, 0, 0], {"eps": 0.0}, [0.9354] * 4 + [-0.9354] * 4),  # std 0.5345
        # mean 0.25, population std sqrt(3)/4: (1 - 0.25) / 0.4330 = sqrt(3)
        ([1, 0, 0, 0], {"ddof": 0, "eps": 0.0}, [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3),
        ([3, 0, 1, 4], {"baseline": "leave_one_out", "scale": "none"}, [3 - 5 / 3, 0 - 8 / 3, 1 - 7 / 3, 4 - 4 / 3]),
        ([1, 0.5], {"baseline": "none", "scale": "none"}, [1, 0.5]),
        # of what is valid
        ([1, 0, 0], {"valid": [[True, True, False]], "eps": 0.0}, [math.sqrt(0.5), -math.sqrt(0.5), 0]),
        # mean 0.5, std 0.5 over two tokens
        (
            [1, 0, 1],
            {"baseline": "none", "scale": "token_whitening", "ddof": 0, "eps": 0.0, "lengths": [[1, 1, 0]]},
            [1.0, -1.0, 0.0],
        ),
    ],
)
def test_advantages_of_one_group(rewards, how, expected):
    assert advantages([rewards], **how)[0].tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("rewards", "how", "expected"),
    [
        ([[1, 1], [0, 0]], {"baseline": "batch_mean", "scale": "none"}, [[0.5, 0.5], [-0.5, -0.5]]),
        ([[1, 0], [1, 0]], {"baseline": "greedy", "scale": "none", "greedy": [1.0, 0.25]}, [[0, -1], [0.75, -0.25]]),
        # std of (1, 0, 1, 1) with ddof 1 is 0.5
        ([[1, 0], [1, 1]], {"scale": "batch_std", "eps": 0.0}, [[1, -1], [0, 0]]),
    ],
)
def test_advantages_across_groups(rewards, how, expected):
    assert advantages(rewards, **how).tolist() == expected


BASELINES = ("group_mean", "leave_one_out", "batch_mean")
SCALES = ("group_std", "batch_std", "token_whitening", "none")


def test_equal_rewards_have_exactly_zero_advantage():
    # 0.1 averaged over 7 is not 0.1 in floating point: dust divided by a tiny std would be a real advantage
    lengths = [[1, 2, 3, 4, 5, 6, 7]] * 2
    for reward, baseline, scale, eps in itertools.product((0.0, 1.0, 0.1, 1 / 3), BASELINES, SCALES, (0.0, 1e-5)):
        values = advantages([[reward] * 7] * 2, baseline=baseline, scale=scale, eps=eps, lengths=lengths)
        assert (values == 0).all(), (reward, baseline, scale, eps)


def test_dividing_by_the_success_rate_weighs_the_rare_right_answer():
    rewards = [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]  # means 1/4, 3/4, 0 and 1
    values = advantages(rewards, scale="group_mean")
    assert values[0].tolist() == [3, -1, -1, -1]
    assert values[1].tolist() == pytest.approx([1 / 3] * 3 + [-1])
    assert (values[2:] == 0).all()
    assert advantages(rewards, baseline="none", scale="group_mean")[:, 0].tolist() == pytest.approx([4, 4 / 3, 0, 1])


def test_the_success_rate_is_that_of_the_rewards_that_are_there():
    there = [[True, True, False, False], [False] * 4]
    values = advantages([[1, 0, 0, 0], [0] * 4], scale="group_mean", valid=there)
    assert values.tolist() == [[1, -1, 0, 0], [0] * 4]


@pytest.mark.parametrize("reward", [0.1, 1.1, -1.0, 2.0])
def test_only_rewards_of_0_and_1_are_divided_by_their_mean(reward):
    with pytest.raises(ValueError, match=f"rewards of 0 and 1, got {reward:g}"):
        advantages([[1, 0, reward]], scale="group_mean")


def test_token_whitening_weights_completions_by_length():
    # tokens: 1 three times, 0 once: mean 0.75, population std sqrt(3)/4
    values = advantages(
        [[1.0, 0.0]], baseline="batch_mean", scale="token_whitening", ddof=0, eps=0.0, lengths=[[3, 1]]
    )[0]
    assert values.tolist() == pytest.approx([1 / math.sqrt(3), -math.sqrt(3)], rel=1e-12)
    tokens = torch.tensor([values[0]] * 3 + [values[1]])
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std(correction=0).item() == pytest.approx(1, rel=1e-12)


def test_max_rewards_keeps_all_of_the_best():
    rewards = torch.tensor([[2.0, 5.0, 5.0, 1.0]])
    assert keep_best(rewards, torch.ones(1, 4, dtype=torch.bool)).tolist() == [[0, 5, 5, 0]]
    assert keep_best(rewards, torch.tensor([[True, False, False, True]])).tolist() == [[2, 0, 0, 0]]


def test_overlong_penalty_is_linear_over_the_buffer():
    lengths = torch.tensor([0.0, 80, 85, 90, 100, 250])  # the turns of an episode may have more together
    penalty = overlong_penalty(lengths, max_completion_length=100, buffer=0.2)
    assert penalty.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])


def test_decoupled_normalisation_keeps_rewards_apart():
    # summed first, (1, 0) and (0, 1) are both 1 and cannot be told from each other; normalised first they can
    values = torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 1, 1, 0]]], dtype=torch.float64)
    weights, valid = torch.ones(2, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    result = normalize_each_reward(values, weights, valid, ddof=1, eps=0.0)[0]
    first = (values[0, 0] - 0.25) / 0.5
    second = (values[1, 0] - 0.5) / values[1, 0].std()
    total = first + second
    assert torch.allclose(result, total / total.std(), atol=1e-12)
    assert result[0] != result[1]


# --- several rewards, and rewards that are missing ----------------------------------------------------------


def test_rewards_are_summed_by_weight():
    values = torch.tensor([[[1.0, 0.0]], [[0.5, 1.0]]])
    rewards, valid = combine_rewards(values, torch.tensor([1.0, 2.0]))
    assert rewards.tolist() == [[2.0, 2.0]]
    assert valid.all()


def test_a_missing_reward_leaves_the_others():
    rewards, valid = combine_rewards(torch.tensor([[[NAN, 1.0]], [[0.5, 0.5]]]), torch.tensor([1.0, 1.0]))
    assert rewards.tolist() == [[0.5, 1.5]]
    assert valid.all()


def test_a_reward_of_weight_zero_does_not_make_a_sample_valid():
    values = torch.tensor([[[NAN, 1.0]], [[0.5, 0.5]]])
    _, valid = combine_rewards(values, torch.tensor([1.0, 0.0]))
    assert valid.tolist() == [[False, True]]


def test_informative_groups_have_two_different_rewards():
    rewards = torch.tensor([[1.0, 1, 1], [0, 0, 1], [0.1, 0.1, 0.1], [1, 0, 0]])
    valid = torch.ones(4, 3, dtype=torch.bool)
    valid[3, 0] = False  # what is left is equal
    assert informative_groups(rewards, valid).tolist() == [False, True, False, False]


def test_infinite_rewards_are_refused():
    with pytest.raises(ValueError, match="infinite"):
        combine_rewards(torch.tensor([[[math.inf, 0.0]]]), torch.ones(1))


@pytest.mark.parametrize("weights", [[0.0], [NAN], [1.0, 1.0]])
def test_unusable_reward_weights_are_refused(weights):
    with pytest.raises(ValueError, match="reward weights"):
        combine_rewards(torch.zeros(1, 2, 2), torch.tensor(weights))


def test_greedy_baseline_without_greedy_rewards_is_refused():
    with pytest.raises(ValueError, match="greedy_values"):
        advantages([[1, 0]], baseline="greedy", scale="none")


# --- process rewards ----------------------------------------------------------------------------------------


def test_token_gets_the_sum_of_the_steps_that_end_at_or_after_it():
    # three steps in the group: 1, 0 and 2; mean 1, std 1 (ddof 1)
    values = torch.tensor([[1.0, 0.0], [2.0, NAN]])
    ends = torch.tensor([[1, 3], [2, -1]])
    result = process_advantages(values, ends, group_size=2, width=5, scale="group_std", ddof=1, eps=0.0)
    assert result.tolist() == [[-1, -1, -1, -1, 0], [1, 1, 1, 0, 0]]


def test_equal_step_rewards_have_exactly_zero_advantage():
    values, ends = torch.full((2, 3), 0.1), torch.tensor([[0, 1, 2]] * 2)
    result = process_advantages(values, ends, group_size=2, width=3, scale="group_std", ddof=1, eps=1e-5)
    assert (result == 0).all()


def test_two_steps_may_end_at_the_same_token():
    values, ends = torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([[1, 1], [0, 1]])
    result = process_advantages(values, ends, group_size=2, width=2, scale="none", ddof=1, eps=0.0)
    assert result.tolist() == [[0, 0], [0, 0]]  # (1 - 2) + (3 - 2) at the same place


PLAIN = {"group_size": 2, "scale": "none", "ddof": 1, "eps": 0.0}


def test_steps_outside_the_completion_are_refused():
    with pytest.raises(ValueError, match="outside"):
        process_advantages(torch.zeros(2, 1), torch.tensor([[0], [4]]), width=4, **PLAIN)
    with pytest.raises(ValueError, match="infinite"):
        process_advantages(torch.full((2, 1), math.inf), torch.zeros(2, 1).long(), width=4, **PLAIN)


# --- properties ---------------------------------------------------------------------------------------------

groups = st.lists(st.lists(st.integers(-8, 8), min_size=4, max_size=4), min_size=1, max_size=4)
mean_baselines, scales = st.sampled_from(BASELINES), st.sampled_from(SCALES)


@settings(max_examples=60, deadline=None)
@given(groups, mean_baselines, scales, st.integers(-100, 100))
def test_shifting_all_rewards_changes_nothing(rewards, baseline, scale, shift):
    before = advantages(rewards, baseline=baseline, scale=scale)
    after = advantages([[r + shift for r in group] for group in rewards], baseline=baseline, scale=scale)
    assert torch.allclose(before, after, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(groups, mean_baselines, scales, st.sampled_from([0.25, 2.0, 16.0]))
def test_scaling_rewards_changes_nothing_but_unscaled_advantages(rewards, baseline, scale, factor):
    before = advantages(rewards, baseline=baseline, scale=scale, eps=0.0)
    after = advantages([[r * factor for r in group] for group in rewards], baseline=baseline, scale=scale, eps=0.0)
    assert torch.allclose(before * (factor if scale == "none" else 1.0), after, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(groups, mean_baselines, scales, st.permutations(range(4)))
def test_order_inside_a_group_does_not_matter(rewards, baseline, scale, order):
    lengths = torch.arange(1, 5).repeat(len(rewards), 1)
    before = advantages(rewards, baseline=baseline, scale=scale, lengths=lengths)
    permuted = torch.tensor(rewards)[:, order]
    after = advantages(permuted, baseline=baseline, scale=scale, lengths=lengths[:, order])
    assert torch.allclose(before[:, order], after, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(groups, st.sampled_from(["group_mean", "leave_one_out"]))
def test_group_baselines_add_up_to_zero(rewards, baseline):
    values = advantages(rewards, baseline=baseline, scale="group_std")
    assert torch.allclose(values.sum(1), torch.zeros(len(rewards), dtype=torch.float64), atol=1e-9)


# --- nothing to divide by -----------------------------------------------------------------------------------

BATCHES = {
    "an empty completion among equal ones": ([[1.0, 1, 1, 0]], None, [[5, 5, 5, 0]]),
    "only empty completions": ([[1.0, 0, 1, 0]], None, [[0, 0, 0, 0]]),
    "one token in all": ([[1.0, 0, 0, 0]], None, [[1, 0, 0, 0]]),
    "rewards without spread": ([[0.1, 0.1, 0.1], [0.7, 0.7, 0.7]], None, [[3, 1, 4], [1, 5, 9]]),
    "one reward throughout": ([[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]], None, [[3, 1, 4], [1, 5, 9]]),
    "groups without a valid reward": ([[1.0, 0], [0, 1]], [[False, False], [False, False]], [[2, 3], [4, 5]]),
    "one valid reward": ([[1.0, 0], [0, 1]], [[True, False], [False, False]], [[2, 3], [4, 5]]),
    "a spread whose square underflows": ([[1e-200, 0.0]], None, [[2, 3]]),
}


@pytest.mark.parametrize("case", BATCHES)
def test_advantages_stay_within_reason_where_there_is_no_spread(case):
    rewards, valid, lengths = BATCHES[case]
    given = {"valid": valid, "lengths": lengths, "greedy": [0.3] * len(rewards)}
    for baseline, scale, ddof, eps in itertools.product([*BASELINES, "greedy", "none"], SCALES, (0, 1), (0.0, 1e-5)):
        values = advantages(rewards, baseline=baseline, scale=scale, ddof=ddof, eps=eps, **given)
        told = (baseline, scale, ddof, eps, values)
        assert torch.isfinite(values).all() and values.abs().max() < 5, told
        if valid is not None:  # at most one
            assert (values[~torch.tensor(valid)] == 0).all(), told
            assert baseline not in BASELINES or (values == 0).all(), told
        if scale == "token_whitening":
            assert (values[torch.tensor(lengths) == 0] == 0).all(), told


def test_decoupled_normalisation_of_rewards_that_cancel_leaves_no_dust():
    weights = torch.tensor([0.1, 0.7, 0.8], dtype=torch.float64)
    up, down = [[1.0, 0.0, 1.0, 0.0]], [[0.0, 1.0, 0.0, 1.0]]
    values, valid = torch.tensor([up, up, down], dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    assert (normalize_each_reward(values, weights, valid, ddof=1, eps=0.0) == 0).all()


# --- sums that are equal on paper ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_sums_are_recognised_whatever_they_are_made_of(dtype):
    # 0.1 + 0.2, 0.3 and 0.6 / 2 are three numbers in binary
    values = torch.tensor([[[1, 0, 0]], [[1, 0, 0]], [[0, 1, 0]], [[0, 0, 0.5]]]).to(dtype)
    rewards, valid = combine_rewards(values, torch.tensor([0.1, 0.2, 0.3, 0.6], dtype=dtype))
    assert rewards.tolist() == [[0.3, 0.3, 0.3]]
    assert informative_groups(rewards, valid).tolist() == [False]


def test_names_that_do_not_exist_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="baseline is 'mean': choose one of group_mean, leave_one_out"):
        advantages([[1, 0]], baseline="mean")
    with pytest.raises(ValueError, match="scale is 'std': choose one of group_std, group_mean, batch_std"):
        advantages([[1, 0]], scale="std")
    with pytest.raises(ValueError, match="scale is 'std'"):
        process_advantages(torch.ones(2, 1), torch.zeros(2, 1).long(), width=1, **PLAIN | {"scale": "std"})


def test_an_overlong_penalty_over_no_tokens_is_refused():
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        overlong_penalty(torch.tensor([1]), max_completion_length=8, buffer=0.0)


def test_a_teacher_reweighs_an_advantage_and_never_turns_its_sign():
    """RLSD, number by number: gaps that raise, lower and leave a token, and some beyond the bounds."""
    gap = torch.tensor([[0.1, -0.1, 0.0, 9.0, -9.0]] * 3, dtype=torch.float64)
    advantages = torch.tensor([[1.5], [-2.0], [0.0]], dtype=torch.float64)
    found = reweighed(advantages, gap, share=0.5, clip=0.2)
    for row, a in enumerate((1.5, -2.0, 0.0)):
        for t, own in enumerate((0.1, -0.1, 0.0, 9.0, -9.0)):
            sign = (a > 0) - (a < 0)
            expected = a * (0.5 + 0.5 * min(max(math.exp(sign * own), 0.8), 1.2))
            assert found[row, t].item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(reweighed(advantages, gap, share=0.0, clip=0.2), advantages.expand(3, 5))
