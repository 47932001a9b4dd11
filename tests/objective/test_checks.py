"""Objectives that make no sense are refused, and the message names what to change."""

import math

import pytest

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms import Term
from grpo_pl.objective.terms.anchor import Anchor

REFUSED = {
    "group_size": [0],
    "num_iterations": [0],
    "num_minibatches": [0],
    "max_resample_attempts": [-1],
    "beta": [-0.1, math.nan, math.inf],
    "epsilon_low": [-0.1, 1.1],
    "epsilon_high": [-0.1],
    "std_eps": [-1e-6],
    "entropy_coef": [-0.1],
    "mismatch_min": [-1.0],
    "mismatch_max": [0.0, math.inf],
    "off_policy_mask": [0.0, math.nan],
    "cispo_cap": [0.0],
    "sapo_temperature_positive": [0.0],
    "sapo_temperature_negative": [-1.0],
    "overlong_buffer": [-0.1, 1.5],
    "dual_clip": [1.1],
    "baseline": ["mean"],
    "std_ddof": [2],
    "surrogate": ["ppo"],
    "vespo_k_positive": [-1.0],
    "vespo_lambda_negative": [math.inf],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_values_outside_their_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        GRPOAlgorithm(**{name: value})
    assert str(value) in str(caught.value)


PLAIN = {"baseline": "none", "scale": "none", "beta": 0.0}
IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}
COMBINATIONS = [
    ({"group_size": 1}, "group_size to 2 or more"),
    ({"group_size": 1, "baseline": "leave_one_out", "scale": "none"}, "group_size to 2 or more"),
    ({"group_size": 1, "baseline": "greedy", "scale": "none", "dynamic_sampling": True}, "group_size to 2 or more"),
    ({"baseline": "greedy"}, "another scale"),
    ({"baseline": "batch_mean"}, "another scale"),
    ({"baseline": "none", "scale": "batch_std"}, "token_whitening or none"),
    ({"scale": "group_mean", "baseline": "leave_one_out"}, "baseline group_mean or none"),
    ({"scale": "group_mean", "overlong_buffer": 0.2}, "overlong_buffer 0"),
    ({"scale": "group_mean"} | IN_REWARD, "kl_placement loss"),
    ({"max_rewards": True}, "baseline none and scale none"),
    ({"reward_aggregation": "normalize_then_sum", "scale": "none"}, "scale group_std"),
    ({"reward_aggregation": "normalize_then_sum", "overlong_buffer": 0.1}, "overlong_buffer 0"),
    ({"reward_aggregation": "normalize_then_sum"} | IN_REWARD, "kl_placement loss"),
    ({"ratio_level": "geometric", "surrogate": "sapo"}, "surrogate clip"),
    ({"ratio_level": "sequence", "surrogate": "reinforce"}, "ratio_level token"),
    ({"ratio_level": "sequence", "surrogate": "dppo_tv"}, "ratio_level token"),
    ({"surrogate": "dppo_kl", "mismatch": "truncate_token"}, "mismatch none"),
    ({"surrogate": "dppo_kl", "mismatch": "in_ratio"}, "mismatch none"),
    ({"surrogate": "reinforce", "mismatch": "in_ratio"}, "mismatch auto"),
    ({"surrogate": "dppo_tv", "epsilon_low": 1.5}, "at most 1"),
    ({"surrogate": "dppo_tv", "dual_clip": 3.0}, "set it to null"),
    ({"ratio_level": "geometric", "dual_clip": 3.0}, "set it to null"),
    ({"surrogate": "sapo", "dual_clip": 3.0}, "set it to null"),
    ({"surrogate": "vespo", "ratio_level": "sequence"}, "ratio_level token"),
    ({"surrogate": "vespo", "mismatch": "truncate_token"}, "mismatch in_ratio"),
    ({"surrogate": "nll"} | PLAIN, "samples correct"),
    ({"surrogate": "nll", "samples": "correct"}, "baseline none"),
    ({"surrogate": "nll", "samples": "correct"} | PLAIN | IN_REWARD, "kl_placement loss"),
    ({"kl_placement": "reward"}, "kl_estimator k1"),
    ({"reference": "refreshed"}, "set both"),
    ({"ref_update_every": 10}, "set both"),
    ({"reference": "refreshed", "ref_update_every": 0}, "at least 1"),
]


@pytest.mark.parametrize(("choices", "advice"), COMBINATIONS, ids=lambda x: str(x)[:60])
def test_contradicting_choices_are_refused_with_advice(choices, advice):
    with pytest.raises(ValueError, match=advice):
        GRPOAlgorithm(**choices)


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        (None, "terms must be a mapping .* got None"),
        ({"mine": {"class_path": "a.B"}}, r"terms\.mine is {'class_path': 'a\.B'}: give an object"),
        ({"mine": Anchor}, r"terms\.mine is <class .*Anchor'>: give an object"),
        ({"mine": Term()}, "no class_path"),
        ({"a": Anchor(coef=0.1), "b": Anchor(coef=0.2)}, "two are of the class Anchor"),
    ],
)
def test_what_is_no_term_is_refused(terms, told):
    with pytest.raises(ValueError, match=told):
        GRPOAlgorithm(terms=terms)
    GRPOAlgorithm(terms={"a": Anchor(coef=0.1), "b": None})


def test_sensible_combinations_are_accepted():
    GRPOAlgorithm(group_size=1, baseline="batch_mean", scale="token_whitening")
    GRPOAlgorithm(group_size=1, baseline="greedy", scale="none")
    GRPOAlgorithm(baseline="group_mean", scale="token_whitening")
    GRPOAlgorithm(scale="group_mean", baseline="none", group_size=1)
    GRPOAlgorithm(reference="refreshed", ref_update_every=30)
    GRPOAlgorithm(ratio_level="geometric", epsilon_low=2.0)  # a log-ratio may be below -1
    GRPOAlgorithm(surrogate="clip", dual_clip=3.0, ratio_level="sequence")
    GRPOAlgorithm(surrogate="dppo_kl", epsilon_low=2.0, mismatch="none")  # a KL divergence may be above 1
